"""List the models that `titanlite new` can write a config for: whether each fits, and how long it trains."""

import sys
from dataclasses import replace

from titanlite.byte_size import byte_size
from titanlite.commands.new_choices import UnfitError, choose_run, parameters_of
from titanlite.commands.new_wishes import Wishes
from titanlite.data.order import epochs
from titanlite.errors import TitanliteError
from titanlite.forecast.outlook import large
from titanlite.preflight.machine import Machine
from titanlite.recipes import names
from titanlite.text_table import folded, terminal_width


def list_models(wishes: Wishes, machine: Machine, of_text: float | None) -> list[str]:
    """Print and return the models that fit, the smallest first, as soon as the fastest run on the machine is found.

    A line has the model's parameters, the tokens that `wishes` has or that suit it, the epochs that they are of
    `of_text` tokens (None: not known), memory of a GPU and the run's time. The last line has all that do not fit, and
    why the first of them does not.
    """
    models, fitting, too_large = sorted(names("model"), key=parameters_of), list[str](), list[str]()
    is_gpu, passes = machine.rates is not None, f"  {'epochs':>7}" if of_text else ""
    width, of = max(map(len, models)), "of each GPU" if is_gpu else "memory"
    _print(f"{'model':{width}}  {'parameters':>13}  {'tokens':>13}{passes}  {of:>11}  {'time':>12}")
    for name in models:
        try:
            found = choose_run("new", replace(wishes, model=name), machine)
            held = byte_size(found.chosen.on_device * (1 if is_gpu else machine.world))
            passes = f"  {epochs(found.trained_on / of_text).split()[0]:>7}" if of_text else ""
            numbers = f"{large(found.parameters):>13}  {large(found.tokens):>13}{passes}  {held:>11}"
            _print(f"{name:{width}}  {numbers}  {found.outlook.lasts:>12}")
            fitting.append(name)
        except UnfitError as error:
            too_large.append(f"{name} ({error.short})" if not too_large else name)
        except TitanliteError as error:
            problem = error.args[0].problems[0]
            _print(f"{name:{width}}  {large(parameters_of(name)):>13}  {problem.where}: {problem.want}")
    if too_large:
        sys.stdout.write(folded(f"{len(too_large)} do not fit: {', '.join(too_large)}\n", terminal_width()))
    return fitting


def _print(row: str) -> None:
    sys.stdout.write(f"  {row}\n")
    sys.stdout.flush()
