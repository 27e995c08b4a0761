"""Models that give logits and, when asked, named intermediates."""
