"""Distils the runs of a multi-agent system, the teacher, into trajectories of one policy.

The teacher is a team of agents that solves tasks with real tools. A run is one attempt of the
teacher at one task: a log of messages between agents (`messages`, `team`). The agent function of an
agent decides the agent's next message; it is a language model or a set of scripted rules
(`agent_functions`, `llm`, `demo.scripted`). Runs are converted to trajectories (`convert`),
filtered (`filters`) and stored (`dataset`). The room imports tools, tasks and rollouts, but neither
evaluation nor training.
"""
