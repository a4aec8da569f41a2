"""What a comparison of servers needs beside them: what the machine can do, the least time by arithmetic, a table, a picture."""
