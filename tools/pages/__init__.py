"""Reports: one HTML file each, without requests, light and dark, for a phone and for paper."""

from neuron_moe.tools.pages.page import (
    Bar,
    Block,
    Details,
    Items,
    Listing,
    Page,
    Picture,
    Row,
    Section,
    Table,
    Text,
    add_report_option,
    render,
    write_page,
)
from neuron_moe.tools.pages.pictures import picture_of

__all__ = [
    "Bar",
    "Block",
    "Details",
    "Items",
    "Listing",
    "Page",
    "Picture",
    "Row",
    "Section",
    "Table",
    "Text",
    "add_report_option",
    "picture_of",
    "render",
    "write_page",
]
