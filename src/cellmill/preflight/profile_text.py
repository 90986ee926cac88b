"""Text of a profile for SLURM, of this repository or by `cellmill profiles new`, from one template."""

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
COMMENT_COLUMN = 28  # unless the text before a comment is longer
THREADS = {"preprocess": 2, "shard": 4, "shard_part": 4, **dict.fromkeys(GPU_STAGES, 8)}
"""CPU cores of stages that can use more than their rules declare."""


@dataclass(frozen=True)
class StagePartition:
    """Partition in which stages run, and the limits of a job there; None for no limit."""

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
    """Values of a profile that depend on the site."""

    head: str  # first comment
    machine: Machine  # machine of train
    device: str  # device of plan
    stages: StagePartition
    gpu_stages: StagePartition  # for the stages GPU_STAGES
    # resources of GPU_STAGES; comments if `gpu_stages` has no partition
    gpu: Mapping[str, str | int]
    status_command: str
    # reason of a value, after the general comment of its key
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def default_mem_mb(self) -> int:
        """MB of a job by default: enough for its two snakemake processes, some 600 MB."""
        return min(4000, 4000 if self.stages.mem_mb is None else self.stages.mem_mb)

    def find_partition(self, stage: str) -> StagePartition:
        """Return the partition in which a stage runs."""
        return self.gpu_stages if stage in GPU_STAGES else self.stages

    def format_threads(self) -> str:
        """Format the mapping of set-threads."""
        cores = {}
        for stage, number in THREADS.items():
            cores[stage] = min(number, self.find_partition(stage).cpus or number)
        return _format_mapping(cores)

    def format_resources(self) -> list[str]:
        """Format the lines of set-resources, without those of train and plan.

        Stages with equal keys share an anchor of YAML.
        """
        texts = {}
        for stage in DECLARED:
            keys = self._list_keys(stage)
            if keys:
                texts[stage] = _format_mapping(keys)
        uses = Counter(texts.values())
        anchors = dict[str, str]()  # the first stage with a text, by text
        lines = []
        for stage, text in texts.items():
            if text in anchors:
                text = f"*{anchors[text]}"
            elif uses[text] > 1:
                anchors[text] = stage
                text = f"&{stage} {text}"
            comment = "" if self.find_partition(stage).partition else "# "
            lines.append(f"{comment}{stage}: {text}")
        return lines

    def _list_keys(self, stage: str) -> dict[str, str | int]:
        """List the keys of a stage: its GPU, and requests that could exceed the partition's limits."""
        partition = self.find_partition(stage)
        keys = dict(self.gpu) if stage in GPU_STAGES else {}
        for key, limit in (("mem_mb", partition.mem_mb), ("runtime", partition.limit_min)):
            smallest, mb_per_unit = DECLARED[stage][key]
            grows = mb_per_unit is not None
            last_attempt = smallest * (1 + RETRIES)
            if limit is None or not (grows or last_attempt > limit):
                continue
            if limit <= smallest:
                keys[key] = limit
                continue
            request = f"int({smallest} + input.size_mb / {mb_per_unit})" if grows else smallest
            keys[key] = f"min({request} * attempt, {limit})"
        return keys


def render(site: Site) -> str:
    """Write the config.yaml of a profile."""
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
        return f"{line[1].ljust(max(COMMENT_COLUMN, len(line[1]) + 2))}# {line[2]}"

    template = environment.get_template("profile_template.yaml")
    text = template.render(site=site, machine=site.machine, retries=RETRIES, note=note, text=quote)
    commented_line = re.compile(r"^( *(?:# )?[\w-]+:.*?) # (.*)$", re.MULTILINE)
    return commented_line.sub(align, text.rstrip("\n")) + "\n"


def quote(text: str) -> str:
    """Write `text` as YAML that Snakemake reads as the same text.

    A text that could be Python, such as `all` or 2-4, gets both quotes.
    """
    inner = quote_for_python(text)
    is_word = re.fullmatch(r"[A-Za-z][\w.,:/-]*", inner)
    if is_word and yaml.safe_load(f"k: {inner}") == {"k": inner}:
        return inner
    return f'"{inner}"'


def quote_for_python(text: str) -> str:
    """Put `text` in quotes, unless Snakemake evaluates it to a text or number that prints the same."""
    try:
        value = evaluate(parse_assignment(f"text={text}"))["text"]
        is_unchanged = str(value) == text
    except Exception:  # whatever the expression raises
        is_unchanged = False
    return text if is_unchanged else f"'{text}'"


def _format_mapping(keys: Mapping[str, str | int]) -> str:
    """Format a mapping as one line of YAML."""
    line = yaml.safe_dump(dict(keys), default_flow_style=True, sort_keys=False, width=math.inf)
    return str(line).strip()
