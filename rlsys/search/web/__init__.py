"""Search of the web: providers, and pages fetched with care."""
