# Assigns what the command line says, as --name=value, to the script's own names; run with exec.
import sys
from ast import literal_eval

for word in sys.argv[1:]:
    name, _, value = word.removeprefix("--").partition("=")
    globals()[name] = literal_eval(value)
