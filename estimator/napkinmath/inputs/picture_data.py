"""Files of data that trainers of denoisers name: what they say of sizes, frames and batches."""

from __future__ import annotations

import os

from napkinmath.base import values
from napkinmath.base.errors import InputError
from napkinmath.base.json_text import loads
from napkinmath.config.job_keys import Difference
from napkinmath.inputs import toml_text, yaml_text
from napkinmath.inputs.nearby import nearby
from napkinmath.models import config_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob


def file_of_data(job: ForeignJob, key: str) -> object:
    """The content of the file that a key names, or what stands there itself; None, with the key
    named as not priced, where the file is not here."""
    named = job.content.get(key)
    if named is not None and not isinstance(named, str):
        return job.take(key)
    path = nearby(named or "", job.path)
    if named and os.path.isfile(path):
        what = f"{job.tool}'s file of data"
        try:
            text = config_file.read_text(path, what=what)
            if path.endswith(".json"):
                found: object = loads(text)
            else:
                load = toml_text.load if path.endswith(".toml") else yaml_text.load
                found = load(text, path, what=what)
        except (InputError, ValueError) as error:
            job.note(str(error))
        else:
            job.take(key)
            return found
    job.leave_out(
        key,
        "it says sizes and frames, and is not here; add --image and --frames",
        memory=Difference.EITHER,
        time=Difference.EITHER,
        option="image",
    )
    return None


def sections(value: object, what: str) -> list[dict[str, object]]:
    """The mappings of a list."""
    return [values.mapping(one, what) for one in values.listed(value) if values.is_mapping(one)]
