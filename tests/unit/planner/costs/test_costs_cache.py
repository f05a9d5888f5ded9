"""The cache of prices makes each of them once."""

from __future__ import annotations

from outsize.planner.costs.cache import Cache


def test_a_price_is_made_once_and_nothing_is_a_price() -> None:
    cache, made = Cache(), list[str]()

    def make(name: str, price: float | None) -> float | None:
        made.append(name)
        return price

    for _ in range(2):
        assert cache.once(("seconds", 1), lambda: make("seconds", 2.0)) == 2.0
        assert cache.once(("room", 1), lambda: make("room", None)) is None
        assert cache.once(("seconds", 2), lambda: make("others", 3.0)) == 3.0
    assert made == ["seconds", "room", "others"]


def test_what_is_being_made_may_ask_for_other_prices() -> None:
    cache = Cache()
    whole = cache.once(("whole",), lambda: 2 * cache.once(("half",), lambda: 4.0))
    assert (whole, cache.once(("half",), lambda: 0.0)) == (8.0, 4.0)
