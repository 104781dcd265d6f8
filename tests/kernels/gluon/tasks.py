"""Tasks of which one runs at a time. Which one runs on, and when a copy lands, is drawn, so that luck hides no race.

A launch ranks its tasks and its copies at random and lets the first in rank that can go on do so: any of them may be
far ahead of the others, or far behind. Now and then rank is ignored.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

ORDER = random.Random(0)  # seed it, and a run can be repeated


class Stopped(BaseException):
    """Another task has failed."""


class Copies(deque[Callable[[], None] | None]):
    """Copies under way that land in this order; None ends a group."""

    def __init__(self, rank: float, *first: Callable[[], None]):
        super().__init__(first)
        self.rank = rank

    def land(self) -> None:
        copy = self.popleft()
        if copy:
            copy()


class Task(threading.Thread):
    """Warps of a program. `program` is whatever they share."""

    def __init__(self, tasks: Tasks, work: Callable[[], None], program: object, warps: int):
        super().__init__(daemon=True)
        self.tasks, self.work, self.program, self.warps = tasks, work, program, warps
        self.rank, self.turn = ORDER.random(), threading.Semaphore(0)
        self.can_run: Callable[[], bool] = lambda: True
        self.copies = Copies(tasks.copy_rank)
        tasks.alive.append(self)
        tasks.flying.append(self.copies)
        self.start()

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.tasks.error:
                self.work()
        except Stopped:
            pass
        except BaseException as error:
            self.tasks.error = self.tasks.error or error
        self.tasks.alive.remove(self)
        self.tasks.go_on(self.tasks.next())


class Tasks:
    """Tasks of one launch. Copies have one rank, so that they are all quick or all slow."""

    def __init__(self) -> None:
        self.alive: list[Task] = []
        self.flying: list[Copies] = []
        self.error: BaseException | None = None
        self.copy_rank = ORDER.random()
        self.whim = ORDER.choice((0.0, 0.05, 0.3))
        self.over = threading.Semaphore(0)

    def run(self) -> None:
        """Until all have ended."""
        self.go_on(self.next())
        self.over.acquire()
        if self.error:
            raise self.error
        assert not any(self.flying), "copies are under way after the end"

    def go_on(self, task: Task | None) -> None:
        (task.turn if task else self.over).release()

    def next(self) -> Task | None:
        while self.alive:
            if self.error:
                return self.alive[0]
            ready = [task for task in self.alive if task.can_run()]
            choices = [*ready, *(queue for queue in self.flying if queue)]
            if not choices:
                self.error = AssertionError("deadlock")
                continue
            whim = ORDER.random() < self.whim
            chosen = ORDER.choice(choices) if whim else max(choices, key=lambda c: c.rank)
            if isinstance(chosen, Task):
                return chosen
            try:
                chosen.land()
            except BaseException as error:
                self.error = error
        return None

    def wait(self, can_run: Callable[[], bool]) -> None:
        """Of the running task: others may take over; it goes on when `can_run`."""
        me = current()
        me.can_run = can_run
        task = self.next()
        if task is not me:
            self.go_on(task)
            me.turn.acquire()
        me.can_run = lambda: True
        if self.error:
            raise Stopped


def current() -> Task:
    task = threading.current_thread()
    assert isinstance(task, Task), "outside a launch"
    return task


def wait(can_run: Callable[[], bool] = lambda: True) -> None:
    """See `Tasks.wait`."""
    current().tasks.wait(can_run)


def fly(copy: Callable[[], None]) -> None:
    """A copy that lands at any time from now on."""
    tasks = current().tasks
    tasks.flying.append(Copies(tasks.copy_rank, copy))
