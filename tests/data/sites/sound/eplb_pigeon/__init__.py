"""A backend that is sound in every respect."""
