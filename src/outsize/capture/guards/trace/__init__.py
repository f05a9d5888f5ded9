"""Follows the user's code, instruction by instruction, while a model is recorded.

    events         when an instruction is about to run, by version of Python
    opcodes        what each instruction takes from the stack and puts there
    read_trace     which frames are followed (user_code); main entry ReadTrace
    instructions   what an instruction does with the shadow stack of its frame (shadow_stack)
    calls, reads   what is noted of a call and of a value; `notes` has what is found
    undone_writes  runs code and takes back what it wrote

Never compares a value with what was noted (`check` does).
"""
