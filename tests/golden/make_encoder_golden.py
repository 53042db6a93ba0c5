"""Makes tests/golden/encoder: a tiny random BERT and the vectors transformers gives.

Command: python tests/golden/make_encoder_golden.py  (torch 2.13.0, transformers 5.23.0)

The directory is laid out as sentence-transformers writes it. vectors.npz has the texts of
TEXTS as 'mean' and 'cls', [n, d], pooled over the last hidden states and scaled to length
1; each text is run on its own. Every parameter is drawn at random (transformers starts
biases at 0 and norms at 1, which would hide that they are ignored).
"""

import json
import pathlib
import shutil
import string

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors
import torch
import transformers

DIRECTORY = pathlib.Path(__file__).parent / 'encoder'
# The last one is longer than max_seq_length, and is cut.
TEXTS = (
  'query: who wrote Été à Oslo?',
  'a',
  '',
  'passage: Ann\nAnn was born in Oslo. 東京 [SEP] 42',
  'the sun rose over the hills and ' * 12,
)
_MAX_TOKENS = 40
_SPECIAL = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')


def _tokenizer():
  letters = string.ascii_lowercase + string.digits
  words = ['query', 'passage', 'who', 'wrote', 'the', 'and', 'was', 'born', '?', ':', '.']
  tokens = [*_SPECIAL, *words, *letters, *(f'##{letter}' for letter in letters)]
  vocab = {token: number for number, token in enumerate(tokens)}
  tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token='[UNK]'))
  tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.post_processor = processors.TemplateProcessing(
    single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 2), ('[SEP]', 3)]
  )
  tokenizer.add_special_tokens(list(_SPECIAL))
  # Published files pad and cut: whoever reads them must undo that.
  tokenizer.enable_padding(pad_id=0, pad_token='[PAD]', length=128)
  tokenizer.enable_truncation(128)
  return tokenizer


def main():
  generator = torch.Generator().manual_seed(0)
  shutil.rmtree(DIRECTORY, ignore_errors=True)
  tokenizer = _tokenizer()
  config = transformers.BertConfig(
    vocab_size=tokenizer.get_vocab_size(),
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=48,
    layer_norm_eps=1e-3,
  )
  model = transformers.BertModel(config).eval()
  for name, x in model.named_parameters():
    noise = torch.randn(x.shape, generator=generator)
    norm = 'LayerNorm.weight' in name
    plain = name.endswith('bias') or 'embeddings' in name
    scale = 0.3 if norm else 0.5 if plain else 1.5 / x.shape[-1] ** 0.5
    x.data = norm + scale * noise
  model.save_pretrained(DIRECTORY)
  tokenizer.save(str(DIRECTORY / 'tokenizer.json'))
  kinds = {'': 'Transformer', '1_Pooling': 'Pooling', '2_Normalize': 'Normalize'}
  modules = [
    {'idx': i, 'name': str(i), 'path': path, 'type': f'sentence_transformers.models.{x}'}
    for i, (path, x) in enumerate(kinds.items())
  ]
  (DIRECTORY / '1_Pooling').mkdir()
  files = {
    'modules.json': modules,
    '1_Pooling/config.json': {
      'word_embedding_dimension': 24,
      'pooling_mode_cls_token': False,
      'pooling_mode_mean_tokens': True,
    },
    'sentence_bert_config.json': {'max_seq_length': _MAX_TOKENS, 'do_lower_case': False},
  }
  for name, content in files.items():
    (DIRECTORY / name).write_text(json.dumps(content, indent=2) + '\n')
  tokenize = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
  pooled = {'mean': [], 'cls': []}
  for text in TEXTS:
    ids = tokenize(text, padding=False, truncation=True, max_length=_MAX_TOKENS)
    with torch.no_grad():
      hidden = model(torch.tensor([ids['input_ids']])).last_hidden_state[0]
    for name, vector in (('mean', hidden.mean(0)), ('cls', hidden[0])):
      pooled[name].append((vector / vector.norm()).numpy())
  np.savez_compressed(
    DIRECTORY / 'vectors.npz', **{name: np.stack(x) for name, x in pooled.items()}
  )


if __name__ == '__main__':
  main()
