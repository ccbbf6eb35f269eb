"""Models and training loops of other libraries. ``make test-integrations`` and ``make test-vision`` install them and run these."""
