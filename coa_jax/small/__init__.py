"""Parts needed only by small policies that are trained from scratch, such as the quickstart's."""
