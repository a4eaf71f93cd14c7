"""Servers: a policy over HTTP with the API of OpenAI, agent programs, and tools.

`app` and `service` serve a policy. `agents` lets external programs solve tasks by calling the
policy. `http` contains the limits and checks of all servers. The room imports `rollout` and
`tasks`, and needs the extra ``serve``. Rollouts load its agent programs by name; training does not
import it.
"""
