"""Basics that every other part uses: checks of arguments, deadlines, environment variables."""
