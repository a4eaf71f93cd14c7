"""Shared parts of the network tools: HTTP with deadlines, address checks, secrets, a store."""
