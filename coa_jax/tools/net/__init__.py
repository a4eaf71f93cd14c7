"""Provides what network tools share: HTTP requests, address checks, API keys, stored answers."""
