"""What processes have in common."""

from webhook.process import one_pass


async def test_a_pass_that_fails_does_not_end_the_passes() -> None:
    class Failing:
        steps = 0

        async def step(self) -> None:
            self.steps += 1
            raise RuntimeError("a bug")

    failing = Failing()
    for _ in range(2):
        await one_pass(failing)
    assert failing.steps == 2
