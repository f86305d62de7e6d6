"""The closed list of names: every file, folder, key and data word of the built-in tasks comes from here.

The tokenizer gives each of them one token, the same one wherever it stands (after a space, a slash, a
quote or at the start of a line), so that copying a name is copying one token.
"""

WORDS: tuple[str, ...] = tuple(
    """
    amber apple arrow aspen atlas badge baker basil beach berry birch blade bloom board brass bread brick
    brook brush cabin cable camel candy canoe cedar chalk charm cherry cider clay cliff cloud clover coast
    cobra comet copper coral cotton crane creek crown daisy dawn delta desert diamond dove dragon drum
    eagle earth ebony elm ember falcon fern field fig finch flame flint forest fox frost garden garnet
    gecko ginger glass globe gold goose grape grove gull guitar hammer harbor hawk hazel heron hill honey
    horn iris iron island ivory ivy jade jasper jewel jungle kettle kite koala lake lamp lark lemon lily
    lime lion lotus lunar lynx magnet mango maple marble meadow melon mint mirror moon moss nectar nickel
    nova oak oasis ocean olive onyx opal orange orbit orchid otter owl palm panda pearl pebble pepper petal
    piano pine planet plum pond poppy prism quail quartz quill rabbit radar rain raven reef ridge river
    robin rocket rose ruby saddle sage salmon salt sand satin shore silk silver sky slate snow spark spice
    spruce star steel stone storm sugar swan temple tiger timber topaz tulip valley velvet violet walnut
    wave willow winter wolf zebra zinc
    """.split()
)

KEYS: tuple[str, ...] = ("port", "size", "level", "limit", "speed", "depth", "width", "delay")

NUMBERS: tuple[int, ...] = tuple(range(1, 21))
