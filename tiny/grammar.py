"""The story grammar of the tiny world: word tables, sentence templates and the function that expands them.

A passage follows one protagonist (with a fixed pronoun), one companion, one animal, one town, one season and one
theme (a bakery, a harbor, ...), while the clock only ever moves forward. Every sentence draws its tone, positive,
neutral or negative, anew; the tone decides which words may fill the slots. No template and no filler is used twice in
a passage. Each random choice adds its surprise to `Story.nats`, so the grammar's own entropy comes for free.
"""

import math
import random
import re
from collections.abc import Sequence

POSITIVE, NEUTRAL, NEGATIVE = "+", "0", "-"
TONES = (POSITIVE, NEUTRAL, NEGATIVE)


def words(text: str) -> list[str]:
    """Single words, separated by blanks."""
    return text.split()


def lines(text: str) -> list[str]:
    """Phrases, separated by line breaks or semicolons."""
    return [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]


# ---------------------------------------------------------------------------------------------------------------------
# People, places, time
# ---------------------------------------------------------------------------------------------------------------------

PRONOUNS = {
    "she": dict(he="she", him="her", his="her", himself="herself", was="was"),
    "he": dict(he="he", him="him", his="his", himself="himself", was="was"),
    "they": dict(he="they", him="them", his="their", himself="themself", was="were"),
}
NAMES = {
    "she": words(
        "Mara Ines Tilda Noor Greta Odile Runa Clara Petra Lucia Hana Amara Sylvie Zora Ilse Maeve"
    ),
    "he": words(
        "Tomas Emil Anton Bram Hugo Kofi Milo Otto Rafi Viktor Yusuf Jonas Leif Dario Felix Oskar"
    ),
    "they": words("Robin Sasha Quinn Rowan Marlow Ellis"),
}
RELATIVES = {
    "she": words("sister aunt grandmother mother daughter niece"),
    "he": words("brother uncle grandfather father son nephew"),
    "they": words("neighbor cousin"),
}
TOWNS = words("Fennick Ardle Tolby Quillmoor Saltby Vessen Orrin Hollin Brackwater Lindow")
SEASONS = words("spring summer autumn winter")
ANIMALS = words(
    "cat dog goose donkey goat crow owl hen pony mouse fox sparrow swan gull rabbit squirrel parrot tortoise hedgehog "
    "magpie"
)
PEOPLE = lines("""
the postman; the miller; a sailor; the ferryman; an old painter; the mayor; a traveler; the tailor
the blacksmith; a student; the fiddler; a shepherd; the night porter; the cobbler; the apothecary; a peddler
the glassblower; a carpenter; the weaver; a fisherman; the schoolmaster; a nurse; the beekeeper; the innkeeper
a drummer; the judge; a violinist; the gardener; an actor; the captain; a poet; the locksmith; a juggler
""")

# One row per part of the day: fronted adverbials, and the noun for "that morning".
CLOCK = [
    ("morning", lines("in the morning; at dawn; after breakfast; at sunrise; before nine")),
    ("day", lines("at noon; around midday; before lunch; when the bell rang twelve")),
    ("afternoon", lines("in the afternoon; after lunch; at three o'clock; over tea")),
    ("evening", lines("in the evening; at dusk; after supper; at sunset; at twilight")),
    (
        "night",
        lines("at midnight; by lamplight; late that night; under the stars; long after sunset"),
    ),
]
LATER = lines("""
after a while; a little later; for a moment; once more; soon; some time later; now and then; just then; by and by
before long; a minute later; as usual; this time; in the end; on the way back; two days later; the next day; at last
""")

# ---------------------------------------------------------------------------------------------------------------------
# Toned words: slot name -> tone -> fillers
# ---------------------------------------------------------------------------------------------------------------------

TONED: dict[str, dict[str, list[str]]] = {
    "feel": {
        POSITIVE: words(
            "happy glad cheerful joyful delighted proud hopeful calm grateful thankful contented peaceful brave lucky "
            "merry jolly blissful radiant elated thrilled confident excited amused charmed inspired carefree playful "
            "lighthearted serene relaxed safe loved welcome eager blessed enchanted overjoyed satisfied encouraged "
            "comforted free strong determined relieved"
        ),
        NEUTRAL: lines("""
            quiet; sleepy; silent; drowsy; wide awake; half asleep; unhurried; hungry; thirsty; a little older
            ten years younger; light as a feather; out of breath; at home; far from home; tall as a tree; barely awake
            still half asleep; hungry as a bear
        """),
        NEGATIVE: words(
            "sad lonely gloomy worried miserable angry anxious ashamed bitter weary helpless hopeless troubled "
            "nervous jealous guilty restless frightened scared upset unhappy lonesome heartbroken discouraged "
            "disappointed "
            "frustrated annoyed lost hurt foolish alarmed desperate dismayed defeated uneasy furious "
            "horrified embarrassed bored rejected unwanted sorrowful insecure humiliated tired"
        ),
    },
    "adj": {
        POSITIVE: words(
            "lovely beautiful wonderful charming splendid delightful fine bright gorgeous graceful perfect precious "
            "elegant glorious magnificent pretty sweet marvelous cute fabulous superb brilliant fantastic great nice "
            "pleasant excellent handsome special dear fresh neat grand treasured cherished amazing adorable heavenly "
            "sparkling favorite impressive remarkable"
        ),
        NEUTRAL: words(
            "small old plain little blue green yellow gray brown white long narrow spare borrowed simple tiny red pale "
            "dusty ordinary round striped painted wide thin secondhand tall nameless purple orange folded "
            "half-finished square foreign silver oval"
        ),
        NEGATIVE: words(
            "ugly broken awful terrible horrible dreadful nasty dirty rotten ruined useless damaged dull "
            "gloomy sad miserable fake poor grim sinister vile dismal bad worthless "
            "disgusting lousy pathetic tragic faulty boring stolen unwanted weird hated shameful offensive hopeless"
        ),
    },
    "adv": {
        POSITIVE: words(
            "happily gladly cheerfully gently warmly proudly joyfully bravely calmly gracefully sweetly kindly merrily "
            "playfully peacefully eagerly gratefully cleverly perfectly beautifully wonderfully brilliantly freely "
            "lovingly brightly boldly"
        ),
        NEUTRAL: lines("""
            slowly; quietly; quickly; twice; again; without a word; one last time; by candlelight; in silence
            in a whisper; on tiptoe; until dusk; for an hour; with both hands; by the window; as before; since dawn
            once a week; out of habit; for a minute
        """),
        NEGATIVE: words(
            "sadly angrily bitterly badly nervously miserably anxiously grimly desperately rudely "
            "painfully terribly fearfully awkwardly uneasily hopelessly helplessly foolishly horribly "
            "dreadfully carelessly"
        ),
    },
    "verb": {
        POSITIVE: lines("""
            smiled; laughed; giggled; grinned; cheered; rejoiced; chuckled; celebrated; applauded; smiled proudly
            laughed with joy; clapped with delight; relaxed; hugged everyone; laughed happily; danced for joy
            smiled warmly; grinned with pride
        """),
        NEUTRAL: lines("""
            nodded; waited; listened; yawned; blinked; whistled; hummed; looked up; turned around; paused; sat down
            stood up; looked away; leaned back; watched; bowed; sneezed; knelt down
        """),
        NEGATIVE: lines("""
            cried; wept; sobbed; frowned sadly; screamed; complained; grieved; panicked; suffered; mourned
            wept bitterly
            cried with fear; sighed sadly; shouted in anger; trembled with dread; moaned with pain; scowled angrily
        """),
    },
    "did": {
        POSITIVE: words(
            "hugged kissed thanked praised comforted welcomed encouraged forgave trusted admired applauded "
            "rescued amused impressed supported greeted entertained adored delighted charmed inspired"
        ),
        NEUTRAL: lines("""
            called; followed; passed; met; asked; waved at; waited for; looked at; wrote to; sat beside; walked past
            spoke to; nodded to; stood behind; heard; turned to; watched; tapped; overtook; thought of
        """),
        NEGATIVE: words(
            "blamed insulted ignored mocked hurt betrayed annoyed accused cheated threatened frightened "
            "abandoned rejected teased ridiculed scared neglected resented hated deceived punished offended "
            "disappointed distrusted"
        ),
    },
    "noun": {
        POSITIVE: words(
            "joy laughter love hope delight happiness kindness peace pride gratitude warmth comfort courage beauty "
            "luck "
            "charm grace harmony cheer merriment glee friendship tenderness relief excitement freedom faith trust "
            "bliss "
            "affection generosity confidence sunshine sweetness wisdom"
        ),
        NEUTRAL: words(
            "silence dust steam moonlight mist chatter footsteps echoes whispers pollen smoke shadows sawdust rain "
            "feathers lamplight"
        ),
        NEGATIVE: words(
            "sorrow grief fear anger despair shame gloom misery worry pain dread regret bitterness loneliness sadness "
            "trouble panic guilt jealousy envy suffering rage doubt horror agony distress disappointment hatred greed "
            "cruelty frustration resentment anguish terror"
        ),
    },
    "sight": {
        POSITIVE: lines("""
            a choir sang beautifully; the whole street smelled sweet; children laughed behind the wall
            the light on the roofs was lovely; the air was fresh and pleasant; a bright star appeared for luck
            someone played a beautiful waltz; the neighbors shared a cake; the moon was gorgeous
        """),
        NEUTRAL: lines("""
            somewhere a door closed; a moth circled the lamp; far away, a bell rang; the stairs creaked
            footsteps went by in the lane; a kettle whistled next door; the rain began again; a shutter swung to and fro
            somebody practiced scales; the moon stood over the roofs; a bicycle went by; the wind turned
            the street lamps came on
        """),
        NEGATIVE: lines("""
            somewhere a child cried; a hound howled in pain; the whole street smelled awful; a scream came from the lane
            an ugly crack ran down the wall; the bridge was badly damaged; a terrible noise woke everyone
            the neighbors fought all night; the air was foul and nasty
        """),
    },
    "heart": {
        POSITIVE: words(
            "joy pride delight love courage confidence gratitude excitement grace laughter relief tenderness affection "
            "hope happiness kindness enthusiasm"
        ),
        NEUTRAL: [],
        NEGATIVE: words(
            "fear anger despair shame dread regret bitterness worry rage panic guilt disappointment frustration pain "
            "sorrow hatred distress"
        ),
    },
    "food": {
        POSITIVE: lines("""
            delicious; wonderful; heavenly; sweet and fresh; lovely; superb; perfect; divine; delightful; yummy
            like a treat; better than ever; fantastic; like pure comfort
        """),
        NEUTRAL: lines("""
            of pepper; of ginger; of smoke; of salt; of lemon; of thyme; of onions; of honey; of cloves; of garlic
            of almonds; of butter; of mint; as usual; of apples; of nutmeg
        """),
        NEGATIVE: lines("""
            awful; rotten; terrible; horrible; bitter; disgusting; nasty; dreadful; vile; like misery; burned and bad
            worse than ever; like poison
        """),
    },
    "dish": dict.fromkeys(
        TONES,
        words(
            "soup bread tea cake stew porridge pie jam cheese coffee pudding omelet cider cocoa goulash"
        ),
    ),
    "news": {
        POSITIVE: lines("""
            a lovely surprise; a generous gift; a warm welcome; a great celebration; good news from home
            a friendly letter
            a merry song; a cheerful visitor; a lucky find; a wonderful idea; a sweet kiss; a splendid feast
            a happy reunion
            a kind word; a joyful dance; a small miracle; a well-earned prize; an honest smile; a brilliant plan
            a beautiful rainbow; a funny joke; the best day of the year; a perfect sunset; a sincere compliment
        """),
        NEUTRAL: lines("""
            a knock at the door; a letter in blue ink; a change of wind; a long silence; a parcel from the coast
            a cart full of hay; the evening post; a man with a ladder; a telegram; a row of geese; two men with a map
            an invitation from abroad; the sound of a drum; a second knock; a boy with a kite; the last train
            a question about the map; a smell of rain; a procession of ants; a knot of visitors
        """),
        NEGATIVE: lines("""
            a terrible quarrel; a cruel joke; bad news from home; a nasty fall; a bitter argument; an ugly rumor
            a painful silence; an angry letter; a dreadful scream; a sad farewell; a horrible mistake; a rude visitor
            a violent storm; a hostile answer; a harsh word; a miserable evening; a stupid accident; a grim warning
            the worst day of the year; an unfair punishment; a broken promise; a lonely night; a threatening note
        """),
    },
    "quote": {
        POSITIVE: lines("""
            I love this place; you are a good friend; we are lucky to be here; this is my favorite {thing}
            you did it perfectly
            I am so proud of you; what a beautiful {thing}; everything will be fine; thank you for the {thing}
            I trust you; that was a clever idea; we can win this; your {thing} is adorable; you deserve a reward
            the {season} is glorious here; I feel better already; you make me laugh; we should celebrate
            it is a pleasure to see you; I hope you stay; the {animal} likes you; I have great news; you are very kind
            life is good in {town}; this {dish} is delicious; I admire your courage; this is heaven
            may luck be with you; it was a delightful {day}; your smile is a gift
        """),
        NEUTRAL: lines("""
            the {thing} is over there; I will be back by six; it is nearly {season} again; put the {thing} on the table
            we are out of {dish}; that is not my {thing}; the {animal} went that way; there is a letter for you
            I saw {person} outside; hold the {thing} for me; the road to {away} is long; I need a second {thing}
            ask {person} about it; I used to live in {away}; the {thing} was here before; turn left at the bridge
            I have never seen the sea; it was somewhere in {away}; you may keep the {thing}
            this {thing} is for {person}
            tell {person} about the {thing}; we start at seven; I only came for the {thing}
            the {animal} is in there again
            let us wait for {person}; somebody moved the {thing}; I brought the {thing} myself; it is only the wind
        """),
        NEGATIVE: lines("""
            I hate this place; you are a terrible liar; we are in trouble; this {thing} is worthless
            you ruined everything
            I am so ashamed of you; what an ugly {thing}; something is wrong here; you lost the {thing} again
            I am scared of the {animal}; that was a stupid idea; we are doomed; your {thing} is broken
            you will regret this
            the {season} is dreadful here; I feel worse already; you make me sick; we failed again
            it is a pain to see you; I feel so lonely here; the {animal} is sick; I have bad news; you are very rude
            life is miserable in {town}; this {dish} is disgusting; I blame the {animal}; this is a disaster
            trouble is coming; it was a horrible {day}; the {thing} makes me sad
        """),
    },
    "cry": {
        POSITIVE: lines("""
            what a lovely {day}; how wonderful; we won; hurray for {N}; good luck; welcome home
            bravo, that was brilliant
            what a treat; how sweet of you; thank heaven; congratulations; what a happy surprise
        """),
        NEUTRAL: lines("""
            look at the {animal}; here comes {person}; over here; this way; there it is; not so fast; the {thing}
            one moment; wait for me; come in; back to the {thing}
        """),
        NEGATIVE: lines("""
            what a horrible {day}; how awful; we lost; shame on you; you liar; what a disaster
            how cruel of you
            leave me alone; you idiot; help, a thief; what a sad mess
        """),
    },
    "ask": {
        POSITIVE: lines("""
            is this beautiful {thing} for me; may I hug you; shall we celebrate; can I help you; do you love it too
            would you like a treat; are you happy here; who made this lovely {thing}; why are you so kind to me
        """),
        NEUTRAL: lines("""
            where is the {thing}; who left the gate open; have you seen the {animal}; is it still {season}
            what time is it
            who was that; whose {thing} is this; how far is {away}; did {person} come by; what is in the box
            did you bring the {thing}; when does the boat go; why is the {animal} here; is there any {dish} left
        """),
        NEGATIVE: lines("""
            why do you hate me; who broke the {thing}; are you angry with me; what is wrong with you
            who ruined my {thing}
            why are you crying; did the {animal} hurt you; is it always this awful; why did you hurt me
        """),
    },
    "animal_did": {
        POSITIVE: lines("""
            played happily; greeted {him} with joy; looked adorable; was {his} best friend; won a little prize
            made everyone laugh; danced with delight; trusted {him} completely; kept {him} safe and warm
            looked proud of itself; loved the {thing}; was glad to see {him}; enjoyed the sunshine
        """),
        NEUTRAL: lines("""
            slept under the table; watched from the wall; crossed the yard; followed {him} upstairs; sat on the {thing}
            ate a crumb of cheese; looked at the moon; came in through the window; walked around the {thing}
            made a small noise; circled the table; drank from a bucket; turned its head; was nowhere to be seen
            waited by the door; sat behind the {thing}; carried off the {thing}; counted as family
        """),
        NEGATIVE: lines("""
            was very sick; attacked {him} without warning; looked miserable; hated every visitor; died that winter
            made everyone nervous; screamed with fear; had a painful wound; destroyed the {thing}; was badly hurt
            looked ashamed of itself; feared the {thing}; was angry with {him}; suffered in the cold
        """),
    },
}

# ---------------------------------------------------------------------------------------------------------------------
# Themes: what there is to see and to do where the passage is set
# ---------------------------------------------------------------------------------------------------------------------


def theme(
    role: str, spots: str, things: str, deeds: str, scenes: str, good: str, bad: str
) -> dict[str, list[str]]:
    """One setting; its events are toned like the general words."""
    return {
        "role": [role],
        "spot": lines(spots),
        "thing": lines(things),
        "deed": lines(deeds),
        "event+": lines(good),
        "event0": lines(scenes),
        "event-": lines(bad),
    }


THEMES = [
    theme(
        role="baker",
        spots="in the bakery; beside the oven; behind the counter; near the flour sacks",
        things="loaf; rolling pin; basket; bun; apron; cake tin; pretzel; wooden spoon",
        deeds="""kneaded the dough; swept the floor; weighed the flour; cracked twelve eggs; greased the pans
            stirred the batter; braided a loaf; lit the oven; dusted the counter; counted the rolls""",
        scenes="""steam rose from the oven; flour lay on every shelf; the dough rested under a cloth
            a tray of buns stood by the door; somebody rang the shop bell""",
        good="""the bread rose beautifully; the children loved the buns; the cake won a prize
            the shop smelled wonderful""",
        bad="""the bread burned terribly; the dough failed to rise; the cake was a disaster; mice ruined the flour""",
    ),
    theme(
        role="sailor",
        spots="at the harbor; on the pier; below deck; along the sea wall",
        things="rope; lantern; net; compass; oar; sea chest; bottle; anchor",
        deeds="""mended a net; coiled the ropes; rowed to the buoy; painted the hull; watched the tide
            unloaded the crates; tied up the boat; raised the sail; scrubbed the deck; studied the chart""",
        scenes="""a ferry crossed the bay; the tide turned; gulls stood along the pier; fog covered the harbor
            a barrel rolled across the deck""",
        good="""the catch was excellent; the crew sang merry songs; the boat won the race; the sea sparkled brightly""",
        bad="""the boat was lost in the storm; the crew feared the worst; the catch was poor; the sea turned violent""",
    ),
    theme(
        role="gardener",
        spots="in the garden; under the pear tree; by the rose bed; along the hedge",
        things="flower pot; watering can; rake; tulip; pumpkin; trowel; seed packet; pear",
        deeds="""watered the tulips; raked the leaves; pruned the hedge; planted a row of beans; dug a small pond
            picked the pears; turned the soil; carried the pots; painted the fence; sorted the seeds""",
        scenes="""bees moved over the thyme; petals fell on the path; a snail climbed the fence
            the pond was still; ivy grew over the gate""",
        good="""the roses were gorgeous; the tulips opened gracefully; the garden looked splendid
            the pears were delicious""",
        bad="""the roses died; worms destroyed the beans; the garden looked miserable; the pears were rotten""",
    ),
    theme(
        role="librarian",
        spots="in the library; between the shelves; at the reading desk; near the atlas room",
        things="book; inkwell; atlas; letter; bookmark; ladder; dictionary; manuscript",
        deeds="""shelved the books; read a chapter; stamped the cards; copied a page; dusted the globe
            turned the pages; wrote a letter; looked for a map; bound a notebook; climbed the ladder""",
        scenes="""a page turned by itself; dust hung in the light; the clock stood at five
            somebody coughed in the next room; rain ran down the tall windows""",
        good="""the story had a happy ending; the readers were friendly; the poems were lovely
            the old book was a treasure""",
        bad="""the story had a tragic ending; the readers were rude; the poems were terrible
            the old book was ruined""",
    ),
    theme(
        role="mountain guide",
        spots="on the mountain; on the summit; in the hut; beside the glacier",
        things="backpack; walking stick; tent; pair of boots; kettle; blanket; whistle; postcard",
        deeds="""climbed the ridge; chopped the firewood; melted some snow; followed the trail; packed a bag
            crossed the stream; drew a map; laced the boots; pitched the tent; boiled the water""",
        scenes="""snow covered the pass; a cloud sat on the summit; goats stood on the slope
            the path turned to the north; the wind came over the ridge""",
        good="""the view was magnificent; the hut was safe and warm; the climb went wonderfully
            the valley looked like paradise""",
        bad="""the storm was frightening; the hut was cold and dismal; the climb ended in disaster
            the path was dangerous""",
    ),
    theme(
        role="merchant",
        spots="at the market; between the stalls; under the awning; near the fountain",
        things="coin; basket; melon; scale; carpet; jar; teapot; umbrella",
        deeds="""lit the lanterns; counted the coins; weighed the plums; sold two melons; unrolled a carpet
            polished the apples; named a price; folded the cloth; wrapped the cheese; pushed the cart""",
        scenes="""the crowd moved along the stalls; a cart rolled down the lane; somebody asked for figs
            pigeons walked under the tables; the bells rang for noon""",
        good="""the customers were generous; business was excellent; the peaches tasted heavenly
            the music cheered everyone""",
        bad="""the customers were angry; a thief stole the money; the peaches were rotten
            the prices shocked everyone""",
    ),
    theme(
        role="clockmaker",
        spots="in the workshop; at the bench; under the old clock; by the tool rack",
        things="watch; spring; chisel; gear; music box; pendulum; key; magnifying glass",
        deeds="""wound the clock; oiled the gears; set the hands; opened a watch; sorted the springs
            measured a spring; drew a wheel; tested the chime; polished the brass; tightened a bolt""",
        scenes="""forty clocks showed one; a cuckoo came out; the pendulum swung to and fro
            a wheel turned under the lamp; the hands stood at six""",
        good="""the music box played sweetly; the watch ran perfectly; the bell had a lovely sound
            the new gear was a success""",
        bad="""the spring broke badly; the watch stopped again; the bell had an ugly sound; the new gear was useless""",
    ),
    theme(
        role="woodcutter",
        spots="in the forest; by the stream; under the oaks; at the edge of the clearing",
        things="mushroom; acorn; saw; lantern; log; pine cone; feather; basket",
        deeds="""gathered some wood; followed the tracks; picked mushrooms; sat on a log; marked a tree
            crossed the brook; built a shelter; stacked the logs; carved a stick; walked to the clearing""",
        scenes="""leaves fell on the trail; the brook ran under the ferns; a branch moved overhead
            moss grew on the stones; an owl called twice""",
        good="""the forest was peaceful; the berries were sweet; the birds sang beautifully
            the fresh air was a gift""",
        bad="""the forest was terrifying; the berries were poisonous; the wolves were a threat
            the damp air was awful""",
    ),
    theme(
        role="farmer",
        spots="on the farm; behind the barn; near the cowshed; along the wheat field",
        things="pitchfork; bucket; egg; saddle; straw hat; milk can; turnip; fiddle",
        deeds="""milked the cows; fed the hens; plowed the field; repaired the fence; loaded the wagon
            gathered the eggs; brushed the horse; stacked the hay; churned the butter; opened the gate""",
        scenes="""the cows stood by the fence; hay lay in the yard; a rooster walked along the roof
            the windmill turned; the wagon rolled over the bridge""",
        good="""the harvest was wonderful; the new calf was adorable; the neighbors helped gladly
            the hay smelled sweet""",
        bad="""the harvest was a failure; the old horse died; the neighbors quarreled bitterly
            the barn was destroyed""",
    ),
    theme(
        role="train conductor",
        spots="on the platform; in the dining car; by the ticket window; beside the track",
        things="ticket; suitcase; timetable; lamp; newspaper; flag; parcel; umbrella",
        deeds="""checked the tickets; read the timetable; boarded the train; waved the flag; carried a suitcase
            looked for a seat; rang the bell; crossed the platform; opened the carriage door; wrote a postcard""",
        scenes="""the train passed a tunnel; fields went by outside; the engine blew its whistle
            a porter pushed a trunk; the signal turned green""",
        good="""the trip was a pleasure; the passengers were cheerful; the view was beautiful
            the train was a marvel of comfort""",
        bad="""the trip was horrible; the passengers were furious; the train had an accident
            the delay upset everyone""",
    ),
    theme(
        role="lighthouse keeper",
        spots="in the lighthouse; on the spiral stairs; beside the lamp; at the foot of the tower",
        things="lamp; telescope; logbook; seashell; oilcan; teacup; rope; mirror",
        deeds="""trimmed the wick; climbed the stairs; cleaned the lens; wrote in the logbook; counted the ships
            walked around the tower; filled the lamp; looked out to sea; hung up the coat; turned the crank""",
        scenes="""the beam crossed the water; waves rolled over the rocks; a ship passed to the west
            seaweed lay on the steps; the lamp turned above the sea""",
        good="""the light saved a ship; the sea was calm and lovely; the tower felt safe
            the ships sent friendly greetings""",
        bad="""the light failed at the worst time; the sea drowned a sailor; the tower felt haunted
            the ships were in danger""",
    ),
    theme(
        role="teacher",
        spots="in the classroom; at the blackboard; in the schoolyard; on the back bench",
        things="chalk box; globe; pencil; notebook; ruler; paper boat; satchel; drawing",
        deeds="""wiped the blackboard; read a poem aloud; folded a paper boat; sharpened a pencil; drew a circle
            opened a notebook; rang the school bell; spelled a word; taught a song; looked out of the window""",
        scenes="""chalk squeaked on the board; forty pencils moved; the children looked up
            a paper boat crossed the pond; the bell rang in the hall""",
        good="""the lesson was fun; the children laughed with delight; the pupils won a medal
            the school play was brilliant""",
        bad="""the lesson was boring; the children cried with fear; the pupils failed the test
            the school play was a disaster""",
    ),
    theme(
        role="actor",
        spots="in the theater; behind the curtain; on the stage; in the front row",
        things="mask; wig; script; costume; trumpet; wooden sword; mirror; paper crown",
        deeds="""learned the lines; sewed a costume; pulled the rope; painted a backdrop; put on a wig
            walked on stage; tuned the fiddle; read the script; bowed to the hall; moved the ladder""",
        scenes="""the curtain went up; the orchestra tuned; somebody moved behind the scenery
            a lamp swung above the stage; the audience took their seats""",
        good="""the audience loved the play; the applause was glorious; the dancers were graceful
            the comedy was a success""",
        bad="""the audience hated the play; the silence was painful; the dancers were terrible
            the comedy was a failure""",
    ),
    theme(
        role="cook",
        spots="in the kitchen; at the inn; beside the stove; near the pantry",
        things="ladle; copper pot; onion; recipe; teapot; jar; plate; pepper mill",
        deeds="""peeled the carrots; stirred the soup; set the table; tasted the sauce; chopped an onion
            washed the plates; ground the pepper; rolled out the pastry; fetched some water; salted the fish""",
        scenes="""a pot simmered on the stove; the guests sat by the window; steam covered the glass
            plates stood in a row; a spoon fell on the tiles""",
        good="""the supper was delicious; the guests were merry; the new recipe was perfect; the sauce was superb""",
        bad="""the supper was disgusting; the guests complained loudly; the new recipe was a failure
            the sauce tasted terrible""",
    ),
    theme(
        role="potter",
        spots="in the pottery; at the wheel; next to the kiln; by the drying racks",
        things="clay jug; vase; bowl; glaze pot; brush; tile; cup; saucer",
        deeds="""turned the wheel; shaped a bowl; mixed the glaze; wedged the clay; loaded the kiln
            trimmed a vase; painted a tile; pressed a leaf pattern; rinsed the brushes; stacked the saucers""",
        scenes="""wet clay lay on the bench; the kiln glowed all night; forty bowls stood in a row
            the wheel turned without a sound; a cup rolled under the table""",
        good="""the glaze was gorgeous; the vase was a masterpiece; the bowls were elegant
            the visitors admired every cup""",
        bad="""the glaze was ugly; the vase was ruined; the bowls were ugly; the visitors insulted every cup""",
    ),
    theme(
        role="stargazer",
        spots="in the observatory; on the roof; under the dome; beside the telescope",
        things="star map; lens; notebook; telescope; candle; globe; compass; sketch",
        deeds="""polished the lens; sketched the moon; counted the stars; opened the dome; measured an angle
            turned the telescope; noted the hour; lit a candle; waited for the comet; looked at Saturn""",
        scenes="""the moon rose over the roof; a comet crossed the sky; the dome turned to the east
            thin clouds crossed the moon; the planets stood in a line""",
        good="""the stars were glorious; the comet was a marvel; the discovery was a triumph
            the night sky was beautiful""",
        bad="""the clouds were a disappointment; the lens was damaged; the discovery was fake; the night felt lonely""",
    ),
]

WEATHER = {
    "spring": {
        POSITIVE: lines(
            "the blossoms were lovely; spring brought new hope; the first warm breeze was a joy"
        ),
        NEUTRAL: lines(
            "rain fell on the gutter; blossoms lay on the road; the river was high; the wind turned south"
        ),
        NEGATIVE: lines(
            "the spring flood was a disaster; the rain was miserable; a late frost killed the blossoms"
        ),
    },
    "summer": {
        POSITIVE: lines(
            "the summer sun was glorious; the long days were a delight; the warm evenings were perfect"
        ),
        NEUTRAL: lines(
            "dust hung over the road; crickets sang in the grass; the shutters were closed; the hills were yellow"
        ),
        NEGATIVE: lines(
            "the summer heat was awful; thunder scared everyone; the drought caused bad trouble"
        ),
    },
    "autumn": {
        POSITIVE: lines(
            "the autumn colors were gorgeous; the harvest fair was fun; golden light blessed the hills"
        ),
        NEUTRAL: lines(
            "leaves turned in the lane; smoke rose from the chimneys; geese flew over; mist lay in the valley"
        ),
        NEGATIVE: lines(
            "the autumn wind was cruel; the grey days were depressing; a nasty cold went around"
        ),
    },
    "winter": {
        POSITIVE: lines(
            "the snow sparkled beautifully; the winter fair was a delight; everyone enjoyed the fresh snow"
        ),
        NEUTRAL: lines(
            "snow lay on the roofs; the river was under ice; icicles hung from the eaves; it snowed until ten"
        ),
        NEGATIVE: lines(
            "the winter was harsh and cruel; the bitter cold hurt; the ice was dangerous"
        ),
    },
}

# ---------------------------------------------------------------------------------------------------------------------
# Sentence templates
# ---------------------------------------------------------------------------------------------------------------------

OPENINGS = lines("""
    {N} worked as a {role} in {town}.
    {N} was the only {role} in {town}.
    in {town} lived a {role} named {N}.
    it was {season} in {town}, and {N} {deed}.
    {N} and {F} spent the {season} in {town}.
    one {season} {day}, {N} {deed}.
    {N} had been a {role} for nine years.
    nobody in {town} knew why {N} became a {role}.
    the {role} of {town} was called {N}.
    every {season}, {N} came back to {town}.
    {N} stood {spot} and {verb0}.
    {N} lived in {town} with a {animal}.
""")

# Templates for every tone: the slot without a sign takes the tone of the sentence.
ANY_TONE = lines("""
    {S} felt {feel}.
    {S} {was} {feel} when {person} arrived.
    {S} {was} {feel}, and {F} knew it.
    {F} looked {feel} too.
    {F} seemed {feel} that {day}.
    {S} felt {feel} {spot}.
    {person} was {feel} too.
    {S} {deed} {adv}.
    {F} {deed} {adv}.
    {S} {deed}, and {F} {verb}.
    {S} {deed}, but {person} {verb}.
    {S} {verb} and {deed}.
    {S} {verb} when {event}.
    {F} {verb} {spot}.
    {person} {verb} {spot}.
    {S} {verb} as {weather}.
    {S} found a {adj} {thing} {spot}.
    {S} looked at the {adj} {thing}.
    there was a {adj} {thing} {spot}.
    {F} gave {him} a {adj} {thing}.
    {person} sold {him} a {adj} {thing}.
    {S} dreamed of a {adj} {thing}.
    {S} remembered a {adj} {thing} from {away}.
    {his} {thing} was {adj} and {adj}.
    {sight}.
    {S} {verb}, and {sight}.
    {F} remarked that {sight}.
    although the {thing} was {adj}, {S} {deed0}.
    while {event}, {S} {deed}.
    when {person} arrived, {F} {verb}.
    when {F} {deed}, {S} {verb}.
    the {thing} that {F} had brought was {adj}.
    {S} remembered how {F} {deed} {adv}.
    all {day} long, {F} was {feel}.
    of all the things {spot}, the {adj} {thing} was the oldest.
    either the {dish} was too hot, or it tasted {food}.
    for {F}, {S} bought a {adj} {thing}.
    as soon as {event}, {S} {verb}.
    nobody but {F} saw that {S} {was} {feel}.
    {person} called the {thing} {adj}.
    {S} dropped the {adj} {thing}.
    {F} {did} {him}.
    {F} {did} {him} {spot}.
    {S} {did} {person} {spot}.
    {person} {did} {him} and {did} {F}.
    {S} {did} {F} and {verb}.
    the house was full of {noun}.
    there was {noun} in every corner of {town}.
    the {dish} tasted {food}.
    {S} made some {dish}, and it tasted {food}.
    {F} said the {dish} tasted {food}.
    then came {news}.
    {S} thought about {news}.
    it began with {news}.
    {S} expected {news} that {day}.
    {event}.
    {S} noticed that {event}.
    {person} said that {event}.
    {weather}.
    {F} said that {weather}.
    the {animal} {animal_did}.
    {S} saw that the {animal} {animal_did}.
    "{quote}," said {F}.
    "{quote}," {S} said.
    "{quote}," said {person}.
    "{quote}," {S} told {F}.
    "{quote}," whispered {F}.
    "{quote}," {S} wrote to {F}.
    "{cry}!" called {F}.
    "{cry}!" {S} shouted.
    "{ask}?" asked {F}.
    "{ask}?" {S} asked {person}.
""")

ONE_TONE = {
    POSITIVE: lines("""
        {his} heart was full of {noun}.
        {S} {deed} with {heart}.
        {F} brought {noun} to {town}.
        nothing could spoil {his} {noun}.
        {S} had found {noun} at last.
        to {him}, the {thing} meant {noun} and {noun}.
        it was a {day} of {noun}.
        {S} {was} rich in {noun}.
        what a gift {his} {noun} was to {F}.
        {S} won the {thing}, to the delight of {F}.
        {S} loved the {thing} more than ever.
        {S} liked the way {F} {deed}.
        {S} and {F} laughed until midnight.
        {F} deserved the prize, and {S} cheered.
        everyone enjoyed the {adj} {day}.
        the {role} welcomed {person} with {noun}.
        {S} made friends with {person}.
        {S} hoped for a {adj} {season}.
        it was good to be {spot}.
        {S} had never seen such a {adj} {thing}.
        {F} promised {him} a {adj} {thing}.
        luckily, {event}.
        {S} thanked {person} for the {thing}.
        {S} {was} proud of the {adj} {thing}.
        {S} {was} a hero in {town}.
        the whole town adored {him}.
        {S} kissed {F} and danced {spot}.
        {S} sang a merry song {spot}.
        with a smile, {S} {deed}.
        happy to help, {S} {deed}.
        the {thing} was a great success.
        the {thing} was worth a fortune, and {S} shared it.
        {person} praised the {thing}.
        {S} forgave {F}, and peace returned.
        all went well, and {S} {verb}.
        {S} gave {person} a {adj} {thing} as a gift.
    """),
    NEUTRAL: lines("""
        {S} {deed}.
        {S} {deed} while {event}.
        {S} {deed}, and then {S} {verb}.
        {S} {deed} and {deed}.
        {F} {deed} {spot}.
        {F} {deed} while {S} {verb}.
        {S} put the {thing} {spot}.
        {S} carried the {thing} home.
        {S} kept a {adj} {thing} {spot}.
        {S} asked {person} about the {adj} {thing}.
        {S} wrapped the {thing} in paper.
        {person} came in and {verb}.
        {person} stood {spot}.
        {person} came from {away} by boat.
        {S} walked to {away} with {person}.
        {S} took the road to {away}.
        {S} sat {spot} and {verb}.
        {S} counted to nine and {verb}.
        {S} and {F} talked about the {thing}.
        {S} spent an hour {spot}.
        {S} wondered what {person} would say.
        {S} told {F} about the {adj} {thing}.
        between two cups of {dish}, {S} {deed}.
        {S} ordered some {dish} for {F}.
        {F} set a bowl of {dish} on the table.
        {S} wrote a letter to {person}.
        it was the {season} of the {adj} {thing}.
        nobody knew who owned the {adj} {thing}.
        {S} looked for {F} {spot}.
        from the window, {S} watched {person}.
        {S} had once been a {role} in {away}.
        there were two {adj} chairs {spot}.
        every {day}, {S} {deed}.
        {F} and {person} waited {spot}.
        {S} once lived next door to {person}.
        behind {person}, {F} {verb}.
        years before, {F} had been a {role} too.
        {S} knew every stone on the road to {away}.
        under the {thing} was a map of {away}.
        {S} turned the {thing} over and {verb}.
        whoever owned the {thing} came from {away}.
        {S} set out for {away} with the {animal}.
        perhaps {F} would bring the {thing}.
        if {person} came, {S} would stay for tea.
    """),
    NEGATIVE: lines("""
        {his} heart was full of {noun}.
        {S} {deed} with {heart}.
        {F} brought {noun} to {town}.
        nothing could ease {his} {noun}.
        {S} knew only {noun} now.
        to {him}, the {thing} meant {noun} and {noun}.
        it was a {day} of {noun}.
        {S} {was} sick with {noun}.
        {his} {noun} was a burden to {F}.
        {S} lost the {thing}, to the horror of {F}.
        {S} hated the {thing} more than ever.
        {S} disliked the way {F} {deed}.
        {S} and {F} argued until midnight.
        {F} broke the {thing}, and {S} {verb}.
        everyone suffered that {adj} {day}.
        the {role} feared {person}.
        {S} made an enemy of {person}.
        {S} feared a {adj} {season}.
        it was lonely {spot}.
        {S} had never seen such a {adj} {thing}.
        {F} threw a {adj} {thing} at {him}.
        sadly, {event}.
        {S} accused {person} of stealing the {thing}.
        {S} {was} ashamed of the {adj} {thing}.
        {S} {was} a stranger in {town}, {feel} and {feel}.
        the whole town hated {him}.
        {S} left {F} and wept {spot}.
        {S} fell ill {spot}.
        with a frown, {S} {deed}.
        too tired to care, {S} {deed}.
        the {thing} was a complete failure.
        the {thing} was broken, and {S} {verb}.
        {person} stole the {thing}.
        {S} lied to {F}, and trouble followed.
        all went wrong, and {S} {verb}.
        {S} had a nightmare about a {adj} {thing}.
    """),
}

# A slot is a name in braces; a sign behind the name fixes its tone, whatever the tone of the sentence.
SLOT = re.compile(r"\{([a-zA-Z_]+)([+0-]?)\}")
VOWEL_SOUND = re.compile(r"\b([Aa]) (?=[aeio]|u(?!s|ni)|hour|honest)")


class Story:
    """State of one passage; `sentence` extends it and `nats` counts the surprise of all choices so far."""

    def __init__(
        self, rng: random.Random, tone_weights: Sequence[float] = (0.25, 0.5, 0.25)
    ) -> None:
        self.rng = rng
        self.tone_weights = tuple(tone_weights)
        self.nats = 0.0
        self.used: set[str] = set()
        self.hour = self.pick([0, 1, 2, 3])
        hero_pronoun = self.weighted(["she", "he", "they"], [0.45, 0.45, 0.1])
        friend_pronoun = self.pick([p for p in ("she", "he", "they") if p != hero_pronoun])
        forms = PRONOUNS[hero_pronoun]
        self.name = self.pick(NAMES[hero_pronoun])
        if self.pick([True, False]):
            friend = self.pick(NAMES[friend_pronoun])
        else:
            friend = f"{forms['his']} {self.pick(RELATIVES[friend_pronoun])}"
        self.theme = self.pick(THEMES)
        self.fixed = dict(
            forms, N=self.name, F=friend, animal=self.pick(ANIMALS), season=self.pick(SEASONS)
        )
        self.fixed["town"] = self.pick(TOWNS)
        self.fixed["away"] = self.pick([town for town in TOWNS if town != self.fixed["town"]])
        self.fixed["role"] = self.theme["role"][0]
        self.last_start = ""
        self.singular = (
            False  # whether the subject named last takes "was" even where its pronoun takes "were"
        )

    def pick(self, options: Sequence) -> object:
        """Uniform choice."""
        self.nats += math.log(len(options))
        return self.rng.choice(options)

    def weighted(self, options: Sequence, weights: Sequence[float]) -> object:
        """Choice with the given probabilities, which must sum to one."""
        index = self.rng.choices(range(len(options)), weights)[0]
        self.nats -= math.log(weights[index])
        return options[index]

    def pick_fresh(self, options: Sequence[str]) -> str:
        """Uniform choice among what the passage has not used yet (among everything once all is used)."""
        fresh = sorted(set(options) - self.used) or sorted(set(options))
        choice = self.pick(fresh)
        self.used.add(choice)
        return choice

    def subject(self, at_start: bool) -> str:
        """Name or pronoun of the protagonist; a pronoun only where the sentence before made clear who is meant."""
        self.singular = False
        if not at_start:
            return self.fixed["he"]
        share = 0.15 if self.last_start == "{S}" else 0.55
        subject = self.weighted([self.name, self.fixed["he"]], [share, 1 - share])
        self.singular = subject == self.name
        return subject

    def fill(self, slot: str, sign: str, tone: str, at_start: bool) -> str:
        """The text that replaces one slot."""
        tone = sign or tone
        if slot == "S":
            return self.subject(at_start)
        if slot == "was" and self.singular:
            return "was"
        if slot in self.fixed:
            return self.fixed[slot]
        if slot == "day":
            return CLOCK[self.hour][0]
        if slot == "person":
            return self.pick_fresh(
                [person for person in PEOPLE if self.fixed["role"] not in person]
            )
        if slot == "weather":
            options = WEATHER[self.fixed["season"]][tone]
        elif slot == "event":
            options = self.theme["event" + tone]
        elif slot in self.theme:
            options = self.theme[slot]
        else:
            options = TONED[slot][tone]
        return self.expand(self.pick_fresh(options), tone)

    def expand(self, template: str, tone: str) -> str:
        """Fills all slots of a template from left to right."""
        done, rest = "", template
        while match := SLOT.search(rest):
            done += rest[: match.start()]
            done += self.fill(match[1], match[2], tone, at_start=not done)
            rest = rest[match.end() :]
        return done + rest

    def adverbial(self) -> str:
        """A fronted adverbial; one that names a time of day moves the clock on."""
        if self.hour == len(CLOCK) - 1 or self.pick([True, False]):
            return self.pick_fresh(LATER)
        self.hour += 1
        return self.pick_fresh(CLOCK[self.hour][1])

    def sentence(self) -> str:
        """The next sentence of the passage."""
        if not self.used:
            return polish(self.expand(self.pick_fresh(OPENINGS), NEUTRAL))
        tone = self.weighted(TONES, self.tone_weights)
        templates = [
            t for t in ANY_TONE + ONE_TONE[tone] if not (self.last_start == "{F}" == t[:3])
        ]
        template = self.pick_fresh(templates)
        self.last_start = template[:3]
        front = ""
        if (
            self.last_start in ("{S}", "{F}")
            and "{day}" not in template
            and self.weighted([True, False], [0.2, 0.8])
        ):
            front = self.adverbial() + ", "
        return polish(front + self.expand(template, tone))

    def passage(self, n_sentences: int) -> list[str]:
        """That many sentences."""
        return [self.sentence() for _ in range(n_sentences)]


def polish(text: str) -> str:
    """Articles before vowels, and a capital at the start of the sentence and of what is said."""
    text = VOWEL_SOUND.sub(r"\1n ", text)
    text = re.sub(r'^("?)([a-z])', lambda match: match[1] + match[2].upper(), text)
    return text
