"""Synthesises new questions with verified answers from a corpus (paper §3.2.1, after TaskCraft).

An author (`facts`, `language`) writes atomic questions from single documents, deepens them hop by
hop and joins parallel ones (`drafts`). Solvers with and without tools decide which questions are
useful (`solvers`, `closed_book`). `build` controls the process.
"""
