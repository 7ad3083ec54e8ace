"""python -m mok"""

from mok.cli import main

if __name__ == "__main__":  # not in the processes that training spawns
    main()
