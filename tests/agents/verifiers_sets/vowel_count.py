"""A task set of one turn with a reward of its own."""

import verifiers.v1 as vf

__all__ = ["VowelTaskset"]


class VowelTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def share(self, trace: vf.Trace) -> float:
        text = trace.last_reply or ""
        return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


class VowelConfig(vf.TasksetConfig):
    pass


class VowelTaskset(vf.Taskset[VowelTask, VowelConfig]):
    def load(self) -> list[VowelTask]:
        prompts = ["Say a word.", "Say another word.", "Say a third word."]
        return [VowelTask(vf.TaskData(prompt=text), self.config.task) for text in prompts]
