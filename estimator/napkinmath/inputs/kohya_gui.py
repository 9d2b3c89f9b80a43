"""Saved settings of the kohya_ss GUI (JSON) as the arguments that it starts sd-scripts with.

What each becomes: bmaltais/kohya_ss kohya_gui/lora_gui.py train_model, finetune_gui.py and
dreambooth_gui.py train_model. Zero, nothing and false are how the GUI writes what is not set.
"""

from __future__ import annotations

from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.picture_scripts import SCRIPT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_RENAMED = {"optimizer": "optimizer_type", "max_resolution": "resolution"}
# Switches of one family's tab, which count where that family is chosen. The tab of fine-tuning
# saves SDXL's switch under another name than that of LoRA (finetune_gui.py save_configuration).
_FAMILIES = {
    **{"sdxl": "sdxl", "sdxl_checkbox": "sdxl", "flux1_checkbox": "flux", "sd3_checkbox": "sd3"},
    **{"anima_checkbox": "anima", "lumina_checkbox": "lumina"},
    "hunyuan_image_checkbox": "hunyuan_image",
}
_TABS = {
    **{"sdxl": "sdxl_", "flux": "flux1_", "sd3": "sd3_", "anima": "anima_", "lumina": "lumina_"},
    "hunyuan_image": "hunyuan_",
}
_OF_TAB = (
    *("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"),
    *("no_half_vae", "fused_backward_pass"),
)
# Of the preparation of pictures before the training (finetune_gui.py prepare_buckets_latents.py).
_OF_DATA = ("batch_size",)
_MODULES = {
    "Standard": "networks.lora",
    "Flux1": "networks.lora_flux",
    "Kohya LoCon": "networks.lora",
    "LoRA-FA": "networks.lora_fa",
    "Kohya DyLoRA": "networks.dylora",
}
KIND = "LoRA_type"
"""The key that only these files have; those of the other tabs lack it."""


def is_of_gui(content: Mapping[str, object]) -> bool:
    """Whether keys are the GUI's."""
    return KIND in content or {"max_resolution", "train_batch_size"} <= {*content}


def as_arguments(content: Mapping[str, object]) -> dict[str, object]:
    """sd-scripts' arguments, and the GUI's own keys as they are."""
    family = next((name for key, name in _FAMILIES.items() if _is_on(content.get(key))), "")
    made: dict[str, object] = {
        _RENAMED.get(key, key): value
        for key, value in content.items()
        if not key.startswith((*_TABS.values(),)) and key not in _OF_DATA
    }
    for key in _OF_TAB:
        if family and _is_on(content.get(f"{_TABS[family]}{key}")):
            made[key] = True
    word = str(content.get("xformers")).lower()  # once a switch, now the kernel's name
    made |= {"xformers": word in ("xformers", "true"), "sdpa": word == "sdpa"}
    kind = content.get(KIND)
    if kind is None:
        made[SCRIPT] = f"{family}_train" if family else "fine_tune"
        return made
    made[SCRIPT] = f"{family}_train_network" if family else "train_network"
    made["network_module"] = _MODULES.get(str(kind), "lycoris.kohya")
    if kind != "Standard" and _is_on(content.get("conv_dim")):
        made["network_args"] = f"conv_dim={content['conv_dim']}"
    rates = (content.get("text_encoder_lr"), content.get("unet_lr"))
    made["network_train_unet_only"] = not _is_on(rates[0]) and _is_on(rates[1])
    return made


def _is_on(value: object) -> bool:
    return not is_off(value) and str(value) not in ("0", "0.0", "")
