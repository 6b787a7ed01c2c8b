"""Names for the users' catalogue."""

from equivcheck.diagnosis.mistake import Change, Mistake, Span, StepFacts, mix_elements, pick, spans

__all__ = ["Change", "Mistake", "Span", "StepFacts", "mix_elements", "pick", "spans"]
