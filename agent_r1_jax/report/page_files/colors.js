// How tokens are coloured: what is told, by which scale, and the legend.

const FIVE_NATS = 5;
// `column` is read from the log, or `of` computes the number of token p from the columns.
const COLORS = {
  none: {about: 'Tokens are not coloured.'},
  mask: {
    scale: maskScale,
    column: 'action_mask',
    about: 'Sampled by the policy, or written by the environment.',
  },
  'log-prob': {
    scale: oneSided,
    column: 'old_logprobs',
    most: FIVE_NATS,
    about: 'log π of the token. Strong: the policy found it unlikely.',
  },
  'sampler log-prob': {
    scale: oneSided,
    column: 'behaviour_logprobs',
    most: FIVE_NATS,
    about: 'Log-prob of the token in the distribution that it was sampled from.',
  },
  'log-ratio to reference': {
    scale: twoSided,
    column: 'ref_logprobs',
    of: (c, p) => c.old_logprobs[p] - c.ref_logprobs[p],
    about: 'log π minus log π of the reference policy.',
  },
  advantage: {
    scale: twoSided,
    column: 'advantages',
    about: 'The update makes tokens above 0 likelier, and those below 0 less likely.',
  },
  value: {
    scale: twoSided,
    column: 'values',
    about: "The critic's value of the state before the token.",
  },
  return: {scale: twoSided, column: 'returns', about: 'The target of the critic.'},
  reward: {
    scale: twoSided,
    column: 'rewards',
    about: 'The reward of a turn, on its last token.',
  },
  'policy version': {
    scale: versions,
    column: 'policy_steps',
    about: 'The number of rollouts that the policy had learned from that sampled the token.',
  },
  'importance weight': {
    scale: twoSided,
    column: 'correction',
    centre: 1,
    about: 'The weight that corrects for an older policy.',
  },
};

/** Returns the colours that some of the episodes have numbers for. */
function listColors(episodes) {
  return Object.keys(COLORS).filter(name =>
    episodes.some(e => e.columns && (name === 'none' || e.columns[COLORS[name].column])),
  );
}

/** Returns the number of token p, or null if there is none. */
function readNumber(name, columns, p) {
  const {column, of} = COLORS[name];
  if (!columns?.[column]) return null;
  const x = of ? of(columns, p) : columns[column][p];
  // Off the actions, 0 says that there is no number.
  const told = columns.action_mask[p] || x || name === 'mask';
  return told && Number.isFinite(x) ? x : null;
}

/** Returns a function from columns and a position to a colour, and the legend's marks. */
function makeScale(name, episodes) {
  const found = episodes.flatMap(({columns}) =>
    (columns?.tokens ?? []).map((_, p) => readNumber(name, columns, p)),
  );
  const numbers = found.filter(x => x !== null);
  if (!numbers.length) return {paint: () => '', marks: []};
  const {color, marks} = COLORS[name].scale(numbers, COLORS[name]);
  const paint = (columns, p) => {
    const x = readNumber(name, columns, p);
    return x === null ? '' : color(x);
  };
  return {paint, marks};
}

const lowestOf = numbers => numbers.reduce((a, b) => Math.min(a, b), Infinity);
const highestOf = numbers => numbers.reduce((a, b) => Math.max(a, b), -Infinity);

/** Mixes a colour of the theme with what is behind the token. */
function tint(hue, share) {
  if (share < 0.02) return '';
  const percent = `calc(var(--most) * ${Math.min(1, share).toFixed(3)})`;
  return `color-mix(in srgb, var(${hue}) ${percent}, transparent)`;
}

/** From 0, which has no colour, to the largest number or to `most`, in one colour. */
function oneSided(numbers, {most = Infinity}) {
  const low = lowestOf(numbers),
    high = highestOf(numbers);
  // Beyond `most` all are alike: one outlier would make the rest pale.
  const size = Math.min(most, Math.max(-low, high)) || 1;
  const color = x => tint('--strong', Math.abs(x) / size);
  const end = low < 0 ? -size : size;
  const marks = [0, 0.25, 0.5, 0.75, 1].map(s => [color(s * end), format(s * end)]);
  return {color, marks};
}

/** One colour below the centre and another above it, equally strong on both sides. */
function twoSided(numbers, {centre = 0}) {
  const reach = Math.max(centre - lowestOf(numbers), highestOf(numbers) - centre) || 1;
  const color = x =>
    tint(x < centre ? '--minus' : '--plus', Math.abs(x - centre) / reach);
  const marks = [-1, -0.5, 0, 0.5, 1].map(s => centre + s * reach);
  return {color, marks: marks.map(x => [color(x), format(x)])};
}

function maskScale() {
  const color = x => (x ? 'var(--mask)' : '');
  return {
    color,
    marks: [
      [color(0), 'environment'],
      [color(1), 'policy'],
    ],
  };
}

/** From the oldest policy to the newest. */
function versions(numbers) {
  const low = lowestOf(numbers),
    high = highestOf(numbers);
  const share = x => (high > low ? (x - low) / (high - low) : 1);
  const color = x =>
    `color-mix(in oklab, var(--new) ${(100 * share(x)).toFixed(0)}%, var(--old))`;
  const all = [...new Set(numbers)].sort((a, b) => a - b);
  const some = all.length > 6 ? [low, high] : all;
  return {color, marks: some.map(x => [color(x), `after ${format(x)} updates`])};
}
