"""The room behind prepare_data.py: text files -> token files.

arguments and plan say what is to be done. sources finds the files, catalog those with a name, and
remote fetches those that are elsewhere. readers reads them in chunks; records and cleaning turn
these into documents. tokenizers obtains a tokenizer; encoder encodes, in the processes of engines
or on a cluster, by ray_engine; writer writes the tokens in order, without the copies that copies
finds, into the folder of work_folder. folders reads finished folders back, and summary describes
them. Nothing here imports torch.
"""
