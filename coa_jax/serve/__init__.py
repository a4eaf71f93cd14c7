"""Servers: a policy over HTTP with the API of OpenAI, agent programs, and tools.

`app` and `service` serve a policy. `agents` lets external programs solve tasks by calling the
policy. `http` contains the limits and checks of all servers. Training and evaluation import this
package only when they use it, because it needs the extra ``serve``.
"""
