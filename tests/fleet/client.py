"""A client that never stops asking, and remembers which version said what."""

import http.client
import random
import threading
import time
from dataclasses import dataclass, field

from engine.serving import ServerProcess, Span, spans_of

TOKENS = 40


@dataclass
class Client(threading.Thread):
    """Asks one request after another, so that a cold engine can repeat each; `kills` is counted up before a kill."""

    server: ServerProcess
    seed: int
    kills: int = 0
    answers: list[list[Span]] = field(default_factory=list)
    interrupted: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self._chance = random.Random(self.seed)
        self._ended = threading.Event()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        while not self._ended.is_set():
            if self.server.page("/health")[0] == 200:
                self.ask()
            else:
                self._ended.wait(0.2)

    def ask(self) -> None:
        kills = self.kills
        prompt = [self._chance.randrange(256) for _ in range(self._chance.randint(1, 8))]
        try:
            self.answers.append(spans_of(prompt, list(self.server.stream(prompt, TOKENS))))
        except (OSError, EOFError, http.client.HTTPException) as error:
            self.interrupted += 1
            if kills == self.kills and not self._ended.is_set():
                self.problems.append(f"a request failed though nobody killed the engine: {error!r}")
            time.sleep(0.2)

    def finish(self) -> None:
        """End the request under way, and no more."""
        self._ended.set()
        self.join(120)

    def spans(self) -> list[Span]:
        return [span for answer in self.answers for span in answer]
