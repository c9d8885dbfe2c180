"""When drafts are worth their cost."""
