"""What runs in other processes is no test here."""

collect_ignore = ["cases"]
