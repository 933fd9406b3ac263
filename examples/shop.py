"""A shop: look up the items of a kind, compare their prices, buy the cheapest. Your own environment starts like this.

springtide doctor env examples/shop.py:Shop
"""

from springtide.env import Environment, TaskList, ToolError, tool

KINDS = {"train": ("lamp", "chair", "kettle", "rug"), "test": ("vase", "clock"), "ood": ("violin", "kayak")}


class Shop(Environment):
    max_turns = 8

    @classmethod
    def tasks(cls, split, level):
        kinds = KINDS[split]
        return TaskList(200, lambda i: cls.make_task(split, level, i, {"kind": kinds[i % len(kinds)]}))

    async def start(self):
        kind = self.task.payload["kind"]
        prices = self.rng.sample(range(5, 100), 3)
        self.prices = {f"{kind}-{number}": price for number, price in zip((11, 12, 13), prices)}
        self.bought = None
        return f"Buy the cheapest {kind}."

    @tool
    async def search(self, kind: str) -> dict:
        """List the items of a kind.

        kind: for example lamp
        """
        return {"items": [item for item in self.prices if item.startswith(f"{kind}-")]}

    @tool
    async def price(self, item: str) -> str:
        """Tell what an item costs.

        item: its name, as search lists it
        """
        if item not in self.prices:
            raise ToolError(f"there is no {item!r}")
        return f"{self.prices[item]} EUR"

    @tool(final=True)
    async def buy(self, item: str) -> str:
        """Buy an item. This ends the task.

        item: its name
        """
        self.bought = item
        return "bought"

    async def score(self):
        return float(self.bought == min(self.prices, key=self.prices.get))

    async def gold(self):
        looks = [("price", {"item": item}) for item in self.prices]
        return [
            ("search", {"kind": self.task.payload["kind"]}),
            *looks,
            ("buy", {"item": min(self.prices, key=self.prices.get)}),
        ]
