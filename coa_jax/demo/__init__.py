"""The demonstration: tasks, pages and a scripted team around the World Factbook, and tiny policies.

The core never imports this package. It finds the task sources, the corpus, the teacher and the
author of the package through entry points, as for any other installed package. The quickstart and
the tests use the demonstration.
"""
