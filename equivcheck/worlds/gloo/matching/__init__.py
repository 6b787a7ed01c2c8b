"""Compares collectives of gloo ranks before they are issued, because gloo itself adds up any bytes."""
