"""Say whether attention ends with documents, by the config alone."""

from titanlite.config.schema import Data


def masks_documents(data: Data) -> bool:
    """Return whether documents are masked in training, as far as the name of its source says.

    Args:
        data: `[data]`. Token files, which end in .bin, have documents if `separator_id` is given.
    """
    return data.document_mask and (data.separator_id is not None or not data.source.endswith(".bin"))
