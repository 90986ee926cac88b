"""Text of a profile: the same template for those of this repository and of `cellmill profiles new`."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from cellmill.config.machine import Machine
from cellmill.preflight.profile import evaluate, parse_assignment
from cellmill.preflight.stage_requests import DECLARED, GPU_STAGES

RETRIES = 2
COMMENTS_AT = 28  # column of the comments, unless the text before them is longer
THREADS = {"preprocess": 2, "shard": 4, "shard_part": 4, **dict.fromkeys(GPU_STAGES, 8)}
"""CPU cores that stages can use beyond what their rules declare."""


@dataclass(frozen=True)
class StagePartition:
    """Partition in which stages run, and the most that a job may request there; None for no limit."""

    partition: str = ""
    qos: str = ""
    limit_min: int | None = None
    mem_mb: int | None = None  # 0 if SLURM does not manage memory: no job may request any
    cpus: int | None = None

    def __str__(self) -> str:
        limit = "any time" if self.limit_min is None else f"{self.limit_min} min"
        memory = f" and {self.mem_mb} MB" if self.mem_mb else ""
        return f"at most {limit}{memory} in partition {self.partition}"


@dataclass(frozen=True)
class Site:
    """The values of a profile that its rules do not know."""

    head: str  # first comment
    machine: Machine  # machine of train
    device: str  # device of plan
    stages: StagePartition
    vectors: StagePartition  # for the stages GPU_STAGES
    # resources of these stages; comments if `vectors` has no partition
    gpu: Mapping[str, str | int]
    status_command: str
    # reason of a value, after the general comment of its key
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def default_mem_mb(self) -> int:
        """Enough for the two small snakemake processes in each job, some 600 MB."""
        return min(4000, 4000 if self.stages.mem_mb is None else self.stages.mem_mb)

    def threads(self) -> str:
        """The mapping of set-threads."""
        cores = {}
        for stage, number in THREADS.items():
            cores[stage] = min(number, self.partition_of(stage).cpus or number)
        return _flow(cores)

    def partition_of(self, stage: str) -> StagePartition:
        return self.vectors if stage in GPU_STAGES else self.stages

    def resources(self) -> list[str]:
        """Lines of set-resources, without train and plan: GPUs and requests that are limited."""
        texts = {}
        for stage, declared in DECLARED.items():
            partition = self.partition_of(stage)
            keys = dict(self.gpu) if stage in GPU_STAGES else {}
            for key, limit in (("mem_mb", partition.mem_mb), ("runtime", partition.limit_min)):
                base, mb_per_unit = declared[key]
                grows = mb_per_unit is not None
                if limit is None or not (grows or base * (1 + RETRIES) > limit):
                    continue
                sized = f"int({base} + input.size_mb / {mb_per_unit})" if grows else base
                keys[key] = limit if limit <= base else f"min({sized} * attempt, {limit})"
            if keys:
                texts[stage] = _flow(keys)
        uses = Counter(texts.values())
        anchors = dict[str, str]()  # stage that a text was written for, by text
        lines = []
        for stage, text in texts.items():
            if text in anchors:
                text = f"*{anchors[text]}"
            elif uses[text] > 1:
                anchors[text] = stage
                text = f"&{stage} {text}"
            comment = "" if self.partition_of(stage).partition else "# "
            lines.append(f"{comment}{stage}: {text}")
        return lines


def render(site: Site) -> str:
    """The profile's config.yaml."""
    environment = Environment(
        loader=PackageLoader("cellmill", "preflight"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )

    def note(name: str, general: str = "") -> str:
        comments = "; ".join(filter(None, (general, site.why.get(name))))
        return f" # {comments}" if comments else ""

    def align(line: re.Match[str]) -> str:
        return f"{line[1].ljust(max(COMMENTS_AT, len(line[1]) + 2))}# {line[2]}"

    template = environment.get_template("profile_template.yaml")
    text = template.render(site=site, machine=site.machine, retries=RETRIES, note=note, text=quote)
    commented_line = re.compile(r"^( *(?:# )?[\w-]+:.*?) # (.*)$", re.MULTILINE)
    return commented_line.sub(align, text.rstrip("\n")) + "\n"


def quote(text: str) -> str:
    """`text` as YAML that Snakemake reads as a text.

    It is in both quotes if it could be Python, as `all` and 2-4 are.
    """
    inner = quote_for_python(text)
    is_word = re.fullmatch(r"[A-Za-z][\w.,:/-]*", inner)
    if is_word and yaml.safe_load(f"k: {inner}") == {"k": inner}:
        return inner
    return f'"{inner}"'


def quote_for_python(text: str) -> str:
    """`text`, in quotes unless Snakemake evaluates it to a text or number that prints the same."""
    try:
        stays = str(evaluate(parse_assignment(f"text={text}"))["text"]) == text
    except Exception:  # whatever the expression raises
        stays = False
    return text if stays else f"'{text}'"


def _flow(keys: Mapping[str, str | int]) -> str:
    """A mapping in one line of YAML."""
    line = yaml.safe_dump(dict(keys), default_flow_style=True, sort_keys=False, width=math.inf)
    return str(line).strip()
