"""The reward ROUGE-L (Lin 2004): the F-score of the longest common subsequence of words."""


def longest_common(one: list[str], two: list[str]) -> int:
    row = [0] * (len(two) + 1)
    for word in one:
        before = 0
        for at, other in enumerate(two, 1):
            before, row[at] = row[at], before + 1 if word == other else max(row[at], row[at - 1])
    return row[-1]


def rouge_l(answer: str, gold: tuple[str, ...], beta: float = 1.0) -> float:
    def score(text: str) -> float:
        words, wanted = answer.lower().split(), text.lower().split()
        common = longest_common(words, wanted)
        if not common:
            return 0.0
        precision, recall = common / len(words), common / len(wanted)
        return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)

    return max(map(score, gold))
