"""A taskset of verifiers, for an environment that has it: reverse a word."""

import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class Letters(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def spell(self, word: str) -> str:
        """Its letters."""
        return " ".join(word)


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def reversed_right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "boom":
            raise ValueError("the grader fell over")
        return float(trace.last_reply == self.data.word[::-1])

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @classmethod
    def toolsets(cls, config):
        return [Letters(vf.ToolsetConfig())]

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ReversingWords(vf.Taskset[WordTask]):
    def load(self):
        return [
            WordTask(WordData(prompt=f"Reverse {word}.", word=word), self.config.task) for word in ("ab", "cde", "fgh")
        ]


__all__ = ["ReversingWords"]

if __name__ == "__main__":  # verifiers starts a server of tools as a program
    Letters.run()
