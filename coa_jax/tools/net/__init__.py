"""Provides what network tools share: HTTP with deadlines, address checks, API keys, a store."""
