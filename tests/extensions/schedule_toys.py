"""Schedules from outside of rlsys: one that works, and some that do not."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge

from rlsys.config.schema import OnUpdate


class InPairs:
    """Begins groups only while fewer than `together` roll or wait; trains those of later admission first."""

    def __init__(
        self,
        *,
        max_staleness: Annotated[int, Ge(0)] = 1,
        max_wait: int | None = None,
        on_update: OnUpdate = OnUpdate.finish,
        together: int = 2,
    ) -> None:
        self.bounds = (max_staleness, max_wait, on_update)
        self._together = together

    def may_admit(self, view: Any) -> bool:
        return view.rolling + view.ready < self._together

    def priority(self, group: Any) -> float:
        return -group.number


class WithoutUpdate(InPairs):
    def __init__(self, *, max_staleness: Annotated[int, Ge(0)] = 1) -> None:
        super().__init__(max_staleness=max_staleness)


class Never(InPairs):
    def may_admit(self, view: Any) -> bool:  # noqa: ARG002
        return False


class RefusesLater(InPairs):
    def may_admit(self, view: Any) -> bool:
        return view.version < 2


class Fails(InPairs):
    def priority(self, group: Any) -> float:
        raise ZeroDivisionError(group.number)


class WithoutPriority:
    def may_admit(self, view: Any) -> bool:
        return bool(view)


class WithoutView(InPairs):
    def may_admit(self) -> bool:  # type: ignore[override]
        return True


class CannotBegin(InPairs):
    def __init__(self, *, size: int = 0) -> None:
        self.size = 1 / size


class StalenessInWords(InPairs):
    def __init__(self, *, max_staleness: str = "two") -> None:
        super().__init__(max_staleness=len(max_staleness))


class UpdateInWords(InPairs):
    def __init__(self, *, on_update: str = "later") -> None:
        super().__init__(on_update=OnUpdate(on_update))


NOT_A_CLASS = 3
