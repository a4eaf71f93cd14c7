"""Synthesises new questions with verified answers from a corpus (paper §3.2.1, after TaskCraft).

An author, which is a model (`language`) or a set of rules of an installed package, writes drafts
(`drafts`): atomic questions about single documents, longer questions hop by hop, and questions that
join two others. Solvers with and without tools decide which questions are useful (`solvers`,
`closed_book`). `build` controls the process.
"""
