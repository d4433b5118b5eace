"""An environment that a policy of random weights learns in a few steps."""

from prl.envs.reverse_text import ReverseText


class Letters(ReverseText):
    """The larger the share of Latin letters in what is said, the better."""

    def reward(self, task, messages):
        text = messages[-1]["content"]
        return sum(char.isascii() and char.isalpha() for char in text) / max(len(text), 1)
