"""The demonstration: tasks, pages and a scripted team around the World Factbook, and tiny policies.

A wing: the core finds its task sources, corpus, teacher and author by entry points, as it finds
those of any package, and never imports it. The quickstart and the tests live on it.
"""
