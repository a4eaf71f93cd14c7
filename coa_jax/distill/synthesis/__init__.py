"""New questions with checked answers from a corpus (paper §3.2.1, after TaskCraft).

An author (`facts`, `language`) writes atomic questions from single documents, deepens them hop by
hop and joins parallel ones (`drafts`); solvers with and without tools decide which of them are of
use (`solvers`, `closed_book`); `build` leads the work.
"""
