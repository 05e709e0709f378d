"""The room behind prepare_data.py: text files -> token files.

arguments, options, settings and job say what is to be done. inputs and corpora find the files,
catalog and remote those that lie elsewhere; remote_file opens these, with patience, and fetching
fetches them ahead. readers bring files, or spans of them, in pieces, cut by cutting; records and
cleaning turn those into documents. tokenizers obtains a tokenizer; encoder encodes, in the
processes of pool, to which engine brings the pieces, or on a cluster, by ray_engine; writer and
seen write the tokens in order. folders reads finished folders back, and summary describes them.
Nothing here imports torch.
"""
