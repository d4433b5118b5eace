"""An entry point with a job that only tells what it was given: `seed` chooses how it ends."""

import json
import os
import signal

from prl.config import UserError
from prl.config.schema import RunConfig
from prl.entry import run_app


def job(config: RunConfig) -> int:
    fields = config.model_dump(include={"seed", "output_dir", "sweep", "swept", "choices"})
    print("POINT " + json.dumps(fields), flush=True)
    if config.seed == 7:
        raise UserError("The dataset is missing.", fix="download it")
    if config.seed == 8:
        raise ValueError("a bug")
    if config.seed == 9:
        return 128 + signal.SIGTERM
    return config.seed % 5


if __name__ == "__main__":
    assert "HYDRA_FULL_ERROR" not in os.environ
    run_app(job, "rl")
