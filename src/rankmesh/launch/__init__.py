"""The launcher behind `rankmesh run`: starts the ranks of one host, shows what they print, and ends them together.

plan        what to start: each rank's command and environment (pure)
stem        (and stem_main) the interpreter from which the ranks branch off
guard       (and guard_main) a process that ends what is left of the ranks if the launcher is killed
output      the ranks' lines, whole, prefixed and bounded
outcome     who failed first, how, and the exit code (pure)
supervisor  the event loop: start, signals, exits, deadlines
launcher    puts these together with the embedded store
"""
