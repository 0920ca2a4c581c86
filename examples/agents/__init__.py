"""Agents for `task.agent=gateway`, each with the library that a user would write it with."""
