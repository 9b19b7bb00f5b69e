"""Several answers of one request as one stream of events, in the order of their coming."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from stoker.generate.job import Job
from stoker.server.errors import RequestError
from stoker.server.service import Answer, Service, Told

_End = Exception | None


def check_choices(service: Service, choices: int | None) -> None:
    """Raises RequestError (400) for more than could ever wait at one time."""
    most = service.batcher.status()
    if (choices or 1) > most.parallel + most.queue:
        raise RequestError(
            "more answers than this server ever holds", field="n", code="invalid_value",
            expected=f"at most {most.parallel + most.queue}", got=choices,
        )  # fmt: skip


def start(service: Service, jobs: Sequence[Job]) -> list[Answer]:
    """Submit all jobs or none."""
    answers: list[Answer] = []
    try:
        for job in jobs:
            answers.append(service.run(job))
    except BaseException:
        for answer in answers:
            answer.cancel()
        raise
    return answers


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Told]]:
    """(index of the answer, event) until all are over. The first failure ends everything: the others are cancelled."""
    if len(answers) == 1:
        async with aclosing(answers[0].events()) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Told] | _End] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, answer, queue)) for index, answer in enumerate(answers)]
    try:
        open_answers = len(pumps)
        while open_answers:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_answers -= 1
            else:
                yield item
    finally:
        for pump, answer in zip(pumps, answers, strict=True):
            pump.cancel()
            answer.cancel()


async def _pump(index: int, answer: Answer, queue: "asyncio.Queue[tuple[int, Told] | _End]") -> None:
    try:
        async for event in answer:
            queue.put_nowait((index, event))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
