"""Other people's training loops: one module for each library, which is imported when it is used and not before.

``lowtide.apply`` works on any module, and these do no more than call it at the right moment.
"""

from __future__ import annotations

from lowtide.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]
