"""The command line: list, run, resume, report and reproduce."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # early: if a group exists already, this keeps it and its threads for ever
from torch import distributed

from train_ref import runner
from train_ref.experiments import EXPERIMENTS
from train_ref.folder import RunFolder
from train_ref.report.page import write_report
from train_ref.report.publish import publish
from train_ref.settings import DESK, PAPER, Settings, option
from train_ref.trainer import Context

OUT = Path("results")


def main() -> None:
    arguments = _parser().parse_args()
    try:
        with runner.errors_in_words():
            arguments.function(arguments)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def list_experiments(arguments: argparse.Namespace) -> None:
    for experiment in EXPERIMENTS.values():
        print(f"{experiment.name:<22}{experiment.shows:<28}{experiment.question}")


def run(arguments: argparse.Namespace) -> None:
    changes = {
        each.name: getattr(arguments, each.name)
        for each in dataclasses.fields(Settings)
        if getattr(arguments, each.name) is not None
    }
    context = _context(arguments)
    folder = runner.new_run(
        arguments.name,
        arguments.out,
        context,
        scale=arguments.scale,
        quick=arguments.quick,
        changes=changes,
        tensorboard=arguments.tensorboard,
    )
    _report(folder, context)


def resume(arguments: argparse.Namespace) -> None:
    folder = RunFolder(arguments.run)
    arguments.backend = folder.config()["backend"]
    context = _context(arguments)
    runner.resume(folder, context)
    _report(folder, context)


def _report(folder: RunFolder, context: Context) -> None:
    if context.rank == 0:
        print(write_report(folder, context.roots))


def report(arguments: argparse.Namespace) -> None:
    folders = [RunFolder(path) for path in arguments.run]
    for folder in folders:
        print(write_report(folder, _roots(arguments)))
    if arguments.publish:
        print(publish(folders, arguments.publish, _roots(arguments)))


def reproduce(arguments: argparse.Namespace) -> None:
    """Every experiment in a process of its own with one thread, as many at a time as there are cores: small
    networks gain little from threads."""
    suffix = "-quick" if arguments.quick else ""
    paths = {name: arguments.out / f"{name}-{arguments.scale}{suffix}" for name in EXPERIMENTS}
    places = ["--data", str(arguments.data)] if arguments.data else []
    backend = ["--backend", arguments.backend] if arguments.backend else []

    def one(name: str) -> bool:
        command = [sys.executable, "-m", "train_ref"]
        if (paths[name] / "config.json").exists():
            command += ["resume", str(paths[name]), *places]
        else:
            command += [
                "run",
                name,
                "--scale",
                arguments.scale,
                "--out",
                str(arguments.out),
                *places,
                *backend,
            ]
            command += ["--quick"] if arguments.quick else []
        print(f"{name} …", flush=True)
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        said = done.stdout.strip() if done.returncode == 0 else done.stderr.strip()
        print(f"{name}: {said}", flush=True)
        return done.returncode == 0

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        succeeded = dict(zip(EXPERIMENTS, pool.map(one, EXPERIMENTS), strict=True))
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)  # the processes under way were interrupted too, and save
        print("\nSaved. The same command goes on", file=sys.stderr)
        raise
    print(
        publish(
            [RunFolder(paths[name]) for name, well in succeeded.items() if well],
            arguments.out,
            _roots(arguments),
        )
    )
    if not all(succeeded.values()):
        failed = ", ".join(name for name, well in succeeded.items() if not well)
        sys.exit(f"Not finished: {failed}. The same command goes on with them")


def _context(arguments: argparse.Namespace) -> Context:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if world > 1:  # torchrun started this process
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
    return Context(arguments.backend, device, _roots(arguments), None, rank, world)


def _roots(arguments: argparse.Namespace) -> list[Path] | None:
    return [arguments.data] if arguments.data else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train_ref", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="what can be run")
    command.set_defaults(function=list_experiments)

    command = commands.add_parser("run", help="run an experiment")
    command.add_argument("name", choices=EXPERIMENTS, metavar="NAME")
    _add_kind(command)
    command.add_argument("--tensorboard", action="store_true", help="write the curves for TensorBoard too")
    _add_settings(command)
    command.set_defaults(function=run)

    command = commands.add_parser("resume", help="go on with a run that was broken off")
    command.add_argument("run", type=Path, metavar="RUN", help="its folder")
    _add_data(command)
    command.set_defaults(function=resume)

    command = commands.add_parser("report", help="write the pages of runs anew")
    command.add_argument("run", type=Path, nargs="+", metavar="RUN", help="their folders")
    command.add_argument("--publish", type=Path, metavar="DIR", help="and one page on all of them there")
    _add_data(command)
    command.set_defaults(function=report)

    command = commands.add_parser("reproduce", help="run every experiment and write one page on them")
    _add_kind(command)
    command.set_defaults(function=reproduce)
    return parser


def _add_kind(command: argparse.ArgumentParser) -> None:
    command.add_argument("--scale", choices=(DESK, PAPER), default=DESK)
    command.add_argument(
        "--quick", action="store_true", help="fewer rows, seeds and epochs: a trial, not a result"
    )
    command.add_argument("--backend", help="cpu, triton or reference; by itself what fits the device")
    _add_data(command)
    command.add_argument("--out", type=Path, default=OUT, help="where run folders are made (%(default)s)")


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data", type=Path, help="folder of the data sets; else $TRIPLETOPS_DATA, then data/"
    )


def _add_settings(command: argparse.ArgumentParser) -> None:
    """An option for every setting, which wins over what the experiment says."""
    group = command.add_argument_group("settings of all trainings, instead of the experiment's own")
    hints = typing.get_type_hints(Settings)
    for each in dataclasses.fields(Settings):
        how: dict[str, Any] = {"default": None, "dest": each.name}
        kind = hints[each.name]
        if type(None) in typing.get_args(kind):  # "… | None"
            kind = typing.get_args(kind)[0]
        if typing.get_origin(kind) is tuple:
            how |= {"type": typing.get_args(kind)[0], "nargs": "*"}
        elif kind is bool:
            how |= {"action": argparse.BooleanOptionalAction}
        else:
            how |= {"type": kind}
        group.add_argument(option(each.name), **how)


if __name__ == "__main__":
    main()
