"""Parts of adapters that read or replace a framework's private attributes."""
