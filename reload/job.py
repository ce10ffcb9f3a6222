"""What the sampler tells the process that stages for it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Item(BaseModel):
    """One tensor to stage. `where`: `file` hashes it in place, `memory` puts it at `offset` of the shared memory,
    `cache` puts it into the cache under `key`."""

    model_config = ConfigDict(frozen=True)

    folded: str
    dtype: str
    where: Literal["file", "memory", "cache"]
    key: str
    offset: int = 0


class Job(BaseModel):
    """What to stage of which version. `digest` is the manifest's: of another one nothing is wanted."""

    model_config = ConfigDict(frozen=True)

    location: str
    digest: str
    items: list[Item]
    memory_size: int = 0  # of the shared memory that comes with the job, if any
    cache_dir: str | None = None
    cache_size: int = 0
    keep: list[str] = []  # cached keys that the engine may still need
    screen: bool = False
