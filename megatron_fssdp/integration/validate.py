"""tmp."""
def validate(args): pass
